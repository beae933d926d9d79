"""Operands as Kubernetes objects, rendered from a policy and facts of the cluster. Pure: no request is made."""
