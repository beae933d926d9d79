"""A host with Debian's libvirtd and QEMU, in namespaces of its own."""
