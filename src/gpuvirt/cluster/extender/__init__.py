"""The scheduler extender: what GPUs have left by the API's nodes and pods, and the answers to the kube-scheduler."""
