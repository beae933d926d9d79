"""The output of programs: nvidia-smi, and the driver in a container."""
