"""Tests of the connections to hypervisors."""
