"""KubeVirt kept right: what its configuration lacks so that machines may have what nodes offer."""
