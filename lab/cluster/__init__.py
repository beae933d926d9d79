"""A real Kubernetes node on this machine: control plane, containerd and kubelet, and nothing left of it afterwards."""
