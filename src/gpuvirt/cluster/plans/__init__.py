"""What `gpuvirt plan node/NAME` decides from a GpuNode; nothing here reads or writes a host."""
