"""The hardware of a plan: GPUs, links, clusters, and the share of their speed that is reached."""
