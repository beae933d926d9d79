"""The shared GPUs of a cluster: the free units of each GPU, from the nodes and pods of the API server."""
