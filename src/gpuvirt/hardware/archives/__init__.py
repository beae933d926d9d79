"""Archives of a host's GPUs: what is copied, and what is hidden."""
