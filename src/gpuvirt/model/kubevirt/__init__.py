"""KubeVirt's configuration and its versions, as far as they decide which devices VMs get."""
