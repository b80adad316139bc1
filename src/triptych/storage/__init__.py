"""Read and copy the files of a checkpoint (configuration and tensors), local or on the Hub."""
