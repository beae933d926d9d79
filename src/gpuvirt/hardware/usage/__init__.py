"""Readers of what uses a device: processes with open files, disks, the host itself."""
