"""Operands in the cluster: which objects are missing or have drifted, and how new pods are rolled out."""
