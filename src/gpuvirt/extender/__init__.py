"""The scheduler extender: its protocol, and the answers to the kube-scheduler."""
