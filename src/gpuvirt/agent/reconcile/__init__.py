"""Brings GPUs to their desired state, one isolation unit at a time."""
