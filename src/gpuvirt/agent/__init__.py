"""The agent of a node, privileged: its devices, its device plugins, its side of the API server, its process."""
