"""Whether NVIDIA's GPU operator runs in the cluster: its leader renews a lease, in any namespace.

Source: gpu-operator's leader election, whose lease has this name in all its versions. Its Deployment may have any
name, and may be scaled to zero; a lease that is being renewed proves that the operator runs.
"""

from gpuvirt.kube.cache import Delta
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.election import DURATION_S, Lease
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Resource

LEASE = "53822513.nvidia.com"
QUIET_S = 4.0 * DURATION_S
"""A lease that names a holder counts as renewed until it has not changed for this time."""


def its_leases() -> Collection[Lease]:
    """Return the collection of the operator's leases in all namespaces."""
    return Collection(Resource("leases", "coordination.k8s.io", "v1"), Lease, LEASE)


class OtherOperator:
    """The observed leases of NVIDIA's operator."""

    def __init__(self) -> None:
        self._observed: dict[ObjectKey, tuple[Lease, float]] = {}
        """Each lease as last observed, and when its current state was first observed."""

    def observe(self, delta: Delta[Lease], now_s: float) -> None:
        """Store the leases, and the time of those that have changed."""
        fresh = {key: delta.objects[key] for key in delta.changed if key in delta.objects}
        self._observed = {key: seen for key, seen in self._observed.items() if key in delta.objects}
        self._observed |= {key: (lease, now_s) for key, lease in fresh.items()}

    def active(self, now_s: float) -> str | None:
        """Return the lease that the operator renews, with its holder; None if none is being renewed."""
        for key, (lease, since_s) in sorted(self._observed.items()):
            if lease.spec.holder_identity and now_s - since_s < QUIET_S:
                return f"lease {key.namespace}/{key.name}, held by {lease.spec.holder_identity}"
        return None
