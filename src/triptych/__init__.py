"""The Transformer, with the matrices of every head in your hands."""
