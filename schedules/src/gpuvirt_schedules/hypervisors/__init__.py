"""Connections to hypervisors that run worker VMs, each in a disposable child process.

`connection` opens them, `child` is the program of the other process.
"""
