"""The node agent's part of the cluster's side: what its node is asked for, and what it says of that."""
