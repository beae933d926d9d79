"""What touches a host: the kernel seam, and the readers that turn files into facts. Synchronous throughout."""
