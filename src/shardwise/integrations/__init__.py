"""Loops of other libraries on top of sharded models. Each module here needs the library of its name."""
