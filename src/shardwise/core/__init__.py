"""The engine: layouts, the schedule of a step, and its execution on real ranks. Imports `base` only."""
