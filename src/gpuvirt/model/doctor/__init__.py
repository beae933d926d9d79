"""What is wrong, and why a VM or a device is blocked."""
