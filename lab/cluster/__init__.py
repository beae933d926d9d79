"""A real Kubernetes node on this computer: control plane, containerd and kubelet, all removed afterwards."""
