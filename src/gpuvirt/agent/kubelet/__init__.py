"""The agent's interfaces to the kubelet: device plugins, the pod-resources API and the checkpoint."""
