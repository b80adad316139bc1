"""What runs in processes of its own, in the environment with the peers: `protocol` has the rules."""
