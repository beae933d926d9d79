"""The decisions of `gpuvirt plan node/NAME` from a GpuNode; nothing here reads or writes a host."""
