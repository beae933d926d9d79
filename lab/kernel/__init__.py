"""A real Linux kernel in a guest, with an emulated IOMMU and PCI functions that carry the identities of GPUs."""
