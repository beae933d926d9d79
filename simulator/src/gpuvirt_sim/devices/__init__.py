"""The simulated devices of a host: PCI functions, VFs, mdevs, VFIO, and the platform around them."""
