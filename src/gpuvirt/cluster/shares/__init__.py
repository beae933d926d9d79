"""The shared GPUs of a cluster: what each has left, by the nodes and pods of the API server."""
