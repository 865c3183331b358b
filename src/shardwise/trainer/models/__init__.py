"""Models of a training run: found, built on the meta device, filled, trained on a loss, sampled from, written out."""
