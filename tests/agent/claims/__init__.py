"""Tests of claims (DRA) on a node."""
