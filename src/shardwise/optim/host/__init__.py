"""Updates of what rests on the host: one pass over memory, on this rank's share of the cores."""
