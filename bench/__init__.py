"""Measures how fast and how small the agent is (`make bench`); nothing here is a test."""
