"""Archives of a host's GPUs: the files that are copied, and the values that are hidden."""
