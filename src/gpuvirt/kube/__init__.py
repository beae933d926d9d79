"""The Kubernetes API server: the objects that gpuvirt reads from it and writes to it."""
