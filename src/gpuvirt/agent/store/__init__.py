"""The agent's state on disk, which outlives the process."""
