"""Family files; see `triptych.checkpoints.family`."""
