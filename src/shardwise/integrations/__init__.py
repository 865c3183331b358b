"""Sharded models in the training loops of other libraries. Each module needs the library of its name."""
