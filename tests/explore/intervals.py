"""The intervals of the explored agent."""

from gpuvirt.agent.loops.intervals import Intervals

INTERVALS = Intervals(
    nodes_s=240.0,
    gates_s=5.0,
    brief_s=240.0,
    whole_s=240.0,
    users_s=120.0,
    suspicious_users_s=10.0,
    state_file_s=3600.0,
    allocations_s=30.0,
    reconcile_s=30.0,
    schedulers_s=3600.0,
)
"""Periodic work is rare, since each occurrence has as many steps as a change."""
