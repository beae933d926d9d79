"""Nodes with GPUs: what each is for, the labels it lacks, what its GpuNode is to want, why it does not serve."""
