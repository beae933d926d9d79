"""Runs the random tests with new seeds, which CI runs with fixed ones."""
