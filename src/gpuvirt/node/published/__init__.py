"""What the agent publishes: files for other programs, and counts for the scheduler."""
