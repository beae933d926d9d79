"""Access to the host: the kernel seam, and the readers that turn files into facts. Everything is synchronous."""
