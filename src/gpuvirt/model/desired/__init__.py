"""What labels, configs, settings and GpuNodes ask for."""
