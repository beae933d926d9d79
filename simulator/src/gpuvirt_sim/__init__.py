"""Simulated hosts and a simulated kubelet, for tests, the demo, and people without GPUs."""

__version__ = "0.1.0"
