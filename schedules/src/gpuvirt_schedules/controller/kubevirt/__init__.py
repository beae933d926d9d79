"""Worker VMs that are KubeVirt's VirtualMachines of the same cluster: read, shut down and started by its API server."""
