"""The access to the kernel: files, ioctls, uevents, leases of devices, and programs of the host."""
