"""Checkpoints of other libraries: read into the same words as our own, and written for them."""
