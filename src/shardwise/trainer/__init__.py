"""Training on top of the engine: a model and data that need no downloads."""
