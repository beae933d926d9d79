"""Frozen records of the observed state of a host, without I/O and without decisions."""
