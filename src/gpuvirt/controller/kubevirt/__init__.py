"""KubeVirt's configuration: finds and writes missing entries, so that VMs may use the devices that nodes offer."""
