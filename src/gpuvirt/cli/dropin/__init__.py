"""The programs under the names of NVIDIA's: vfio-manage, nvidia-vgpu-dm, nvidia-k8s-vgpu-dm."""
