"""The commands that change GPUs by hand: vfio and vgpu."""
