"""Connections to hypervisors that run worker VMs, each in a disposable child process.

`sharing` opens them, `connection` is one in this process, `child` the program of the other process.
"""
