"""The published state of the agent: files for other programs, and counts for the scheduler."""
