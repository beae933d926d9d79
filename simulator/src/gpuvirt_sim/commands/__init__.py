"""The commands that need no GPU: sim and demo."""
