"""The vGPU frameworks of hosts, each behind the same Protocol."""
