"""Access to an API server: its address and credentials, from a kubeconfig or a pod."""
