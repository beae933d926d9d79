"""The controller's part of the cluster's side: what all nodes are for, and what is to run where for that."""

"""The controller's part of the cluster's side: what is to be written, decided from what was heard."""
