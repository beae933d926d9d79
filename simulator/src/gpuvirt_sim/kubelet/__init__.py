"""A simulated kubelet: its device manager, and the sockets and files around it."""
