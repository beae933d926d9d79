"""KubeVirt's configuration: finds and writes what it lacks, so that VMs may use the devices that nodes offer."""
