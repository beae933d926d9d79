"""GPU virtualization for Kubernetes: turns the physical GPUs of nodes into devices of VMs."""

__version__ = "0.1.0"
