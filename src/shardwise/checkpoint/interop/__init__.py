"""Read checkpoints of other libraries into the same index as our own, and write checkpoints for them."""
