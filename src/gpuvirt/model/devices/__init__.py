"""The functions and vGPUs that can be offered."""
