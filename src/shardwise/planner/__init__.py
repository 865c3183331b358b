"""What there is to shard, and what it will cost: pure, without a process group or a GPU."""
