"""Room: reports."""
