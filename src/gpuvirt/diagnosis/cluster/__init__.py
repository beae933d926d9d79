"""The objects that `gpuvirt why vm/NAME` reads from the API server: VMs, VMIs, pods, nodes and GpuNodes."""
