"""What a micro-batch asks of each unit: from an autograd of byte counts, or from a run on the meta device."""
