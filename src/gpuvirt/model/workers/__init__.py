"""The shape of VgpuSchedules and of the worker VMs that they name: what others than their own distribution read."""
