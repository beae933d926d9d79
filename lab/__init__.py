"""Labs: real Kubernetes nodes and real kernels on one computer, which the simulators are compared with."""
