"""vGPUs that are created when the kubelet allocates them to a pod."""
