"""Kata's handling of a pod's devices before its VM starts, by the CDI library that Kata uses."""
