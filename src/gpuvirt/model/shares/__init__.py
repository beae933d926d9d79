"""Fractions of GPUs: what pods request, what GPUs have left, and where a pod's containers go."""
