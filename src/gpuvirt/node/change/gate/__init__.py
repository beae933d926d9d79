"""The gate of an isolation unit: its locks and its record, by which Allocate and changes exclude each other."""
