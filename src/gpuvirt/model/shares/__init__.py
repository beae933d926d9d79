"""Fractions of GPUs: the requests of pods, the free units of GPUs, and the placement of containers."""
