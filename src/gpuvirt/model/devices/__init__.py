"""Which functions and vGPUs could be offered."""
