"""Nodes with GPUs: the workload, the labels and the GpuNode's spec of each, and why its GPUs are not offered."""
