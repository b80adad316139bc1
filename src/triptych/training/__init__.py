"""Room: training."""
