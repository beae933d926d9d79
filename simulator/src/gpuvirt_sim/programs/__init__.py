"""The simulated programs of NVIDIA: nvidia-smi, sriov-manage, and the vGPU manager."""
