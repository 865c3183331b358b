"""Cost of a step's events: memory at every instant, and seconds."""
