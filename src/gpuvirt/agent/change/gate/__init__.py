"""The gates: locks and records on disk by which Allocate and changes of GPUs exclude each other."""
