"""GPU virtualization for Kubernetes: the physical GPUs of a node as devices of virtual machines."""

__version__ = "0.1.0"
