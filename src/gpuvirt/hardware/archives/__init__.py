"""Archives of a host's GPUs: the files that are copied, and the values that are hidden.

Everything that leaves a host is read through one kernel that redacts secrets, copied files and `doctor.json` alike, so
they can't differ. Files are listed, not found. Doctor's own function selects its files, so an archive has each one.
`host/` has the host's layout: commands with `--host-root` read it, and `gpuvirt sim import` amends a simulated host
until doctor reads the same there. Doctor asks no cluster by itself: the agent's account may not read KubeVirt's
configuration.
"""
