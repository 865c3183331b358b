"""The public functions about a model: sharding it, its whole weights and gradients, its memory, captured steps."""
