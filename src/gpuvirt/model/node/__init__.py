"""What one node looks like, and what is decided for it."""
