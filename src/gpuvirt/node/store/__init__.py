"""State that outlives the process, on disk."""
