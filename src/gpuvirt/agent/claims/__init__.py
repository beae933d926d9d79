"""Claims (DRA) on a node: their GPUs are prepared in the shape that each has, and given back."""
