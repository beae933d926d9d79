"""The kubelet's side of the agent: device plugins, pod resources and the checkpoint, over unix sockets and files."""
