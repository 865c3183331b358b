"""Checkpoints: what was saved under any layout and world loads under any other, and training goes on as if nothing was.

k steps, save, load elsewhere and n - k more steps are n steps. A save that fails, on whatever rank, is an error on
every rank and leaves the checkpoint that was there before. Loading executes nothing: safetensors and JSON only.
"""
