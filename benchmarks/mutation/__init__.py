"""Mutation testing: which small changes of the source no test notices."""
