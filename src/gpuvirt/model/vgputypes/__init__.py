"""The cards that carry vGPUs, and their vGPU types."""
