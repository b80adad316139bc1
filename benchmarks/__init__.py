"""Ours and theirs, interleaved on one machine: see README.md."""
