"""Checkpoints: a model saved under any layout and world size loads under any other.

k steps, a save, a load elsewhere and n - k more steps give the same training as n steps. A save that fails, on whatever
rank, is an error on every rank and leaves the previous checkpoint as it was. Loading executes nothing: our format is
safetensors and JSON.
"""
