"""Explores schedules of the shipped agent: the order of strands, actors and timers, and what they may harm.

A proof about a model holds only for the model, so the shipped code runs. A schedule departs from a default order, and a
departure may hold a strand back until a later step; with plain preemptions, as in CHESS, a request within a change
would need one for each step. Three departures would take hours to days for each scenario. If the host stops, data that
was not synced is lost, which is stricter than most file systems; a killed process loses no write. Pods of other plugins
count as harmed if the account that the step read had them, or if it read none.
"""
