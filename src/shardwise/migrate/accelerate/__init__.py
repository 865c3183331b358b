"""Accelerate's YAML, and what its launcher says in the environment: what every key becomes."""
