"""Readers of PCI functions: ids, IOMMU groups, SR-IOV, kernel modules."""
