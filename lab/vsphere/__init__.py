"""A vCenter with worker VMs that have vGPUs, as a program: govmomi's simulator, and what it lacks (*.go)."""
