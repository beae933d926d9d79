"""Simulated hosts and a simulated kubelet, for tests, the demo, and people without GPUs."""
