"""The file tree of a simulated host: files, faults, writes that block or take time, processes."""
