"""GPU virtualization for Kubernetes: whole GPUs and vGPUs for VMs, and shares of GPUs for containers."""

__version__ = "0.1.0"
