"""Work of each unit in a micro-batch: from an autograd of byte counts, or from a run on the meta device."""
