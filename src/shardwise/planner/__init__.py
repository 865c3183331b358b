"""Shapes, costs and the search for a strategy: pure, without a process group or a GPU."""
