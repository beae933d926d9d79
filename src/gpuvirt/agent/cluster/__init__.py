"""The agent's work at the API server: it reads the desired state of its node and writes GpuNode, labels and events."""
