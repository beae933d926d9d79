"""The configuration of the kube-scheduler that asks gpuvirt's extender about shares of GPUs."""
