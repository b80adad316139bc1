"""The tables, a module each; a table's `measure` gives a record for `harness.page`."""
