"""The shares of this node's GPUs: their records on disk, their CDI specs, and the answers to the kubelet."""
