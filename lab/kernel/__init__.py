"""A real Linux kernel in a guest, with an emulated IOMMU and PCI functions with the identities of GPUs."""
