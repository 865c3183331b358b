"""Any torch optimizer, on shards."""
