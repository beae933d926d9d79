"""The kubelet's side of shares: the device plugin of units, and the kubelet's record of their containers."""
