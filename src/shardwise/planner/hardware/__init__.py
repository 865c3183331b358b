"""What a plan is made for: GPUs, links, clusters, and how much of them work gets."""
