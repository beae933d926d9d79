"""Frozen records of what was seen on a host; no I/O, no judgement."""
