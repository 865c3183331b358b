"""What the events of a step come to: memory at every instant, and seconds."""
