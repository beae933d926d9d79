"""The desired state, from labels, configs, settings and GpuNodes."""
