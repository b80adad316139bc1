"""Others' checkpoints: configuration, weights and tokenizers, read into ours."""
