"""Explores the schedules of the shipped agent: which strand, actor or timer goes next, and what that may harm."""
