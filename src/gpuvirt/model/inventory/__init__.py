"""What the host is: GPUs, IOMMU groups, isolation units, names."""
