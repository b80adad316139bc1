"""Room: decoding."""
