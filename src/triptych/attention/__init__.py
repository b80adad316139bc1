"""Room: attention."""
