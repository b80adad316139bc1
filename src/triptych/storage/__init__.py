"""The files of a checkpoint: configuration and tensors, local or on the Hub; reading and copying them."""
