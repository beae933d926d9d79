"""VgpuSchedules: which worker VMs run in which phase, and what is asked of the hypervisor that runs them."""
