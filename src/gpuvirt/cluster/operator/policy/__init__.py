"""The ClusterPolicy: which one counts, what follows from it, what of it is invalid, and the status it gets."""
