"""DeepSpeed's JSON: what every key becomes."""
