"""A cluster with worker VMs and their hypervisor, in memory and in virtual time."""
