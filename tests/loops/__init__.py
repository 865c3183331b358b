"""Training loops as users write them, under every layout: each must equal one process, or be refused."""
