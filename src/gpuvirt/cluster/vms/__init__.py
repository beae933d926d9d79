"""The VMs of a cluster as `gpuvirt why vm/NAME` sees them: what the API server is asked for, and what is read of it."""
