"""What the facts mean, and what to do about it: pure functions over frozen records."""
