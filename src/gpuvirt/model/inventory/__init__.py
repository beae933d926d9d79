"""The inventory of a host: GPUs, vGPUs, IOMMU groups, isolation units, names."""
