"""Explores schedules of the shipped agent: the order of strands, actors and timers, and what they may harm."""
