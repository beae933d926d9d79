"""Whether NVIDIA's GPU operator runs in the cluster: by the lease that it renews, in whatever namespace.

Source: gpu-operator's leader election, whose lease has this name in all its versions. Its Deployment may be called
anything, and one that is there may be scaled to none; a lease that is renewed has somebody who acts.
"""

from gpuvirt.cluster.cache import Delta
from gpuvirt.cluster.client import Collection
from gpuvirt.cluster.election import DURATION_S, Lease
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.resources import Resource

LEASE = "53822513.nvidia.com"
QUIET_S = 4.0 * DURATION_S
"""A lease that was not renewed for so long is nobody's; until then one that names a holder is taken for renewed."""


def its_leases() -> Collection[Lease]:
    """Return that lease in all namespaces."""
    return Collection(Resource("leases", "coordination.k8s.io", "v1"), Lease, LEASE)


class OtherOperator:
    """What is known of it."""

    def __init__(self) -> None:
        self._observed: dict[ObjectKey, tuple[Lease, float]] = {}
        """Each lease as it was last seen, and when it was first seen so."""

    def observe(self, delta: Delta[Lease], now_s: float) -> None:
        """Take what the leases say."""
        fresh = {key: delta.objects[key] for key in delta.changed if key in delta.objects}
        self._observed = {key: one for key, one in self._observed.items() if key in delta.objects}
        self._observed |= {key: (lease, now_s) for key, lease in fresh.items()}

    def active(self, now_s: float) -> str | None:
        """Return where it was seen at work, None where it is not."""
        for key, (lease, since_s) in sorted(self._observed.items()):
            if lease.spec.holder_identity and now_s - since_s < QUIET_S:
                return f"lease {key.namespace}/{key.name}, held by {lease.spec.holder_identity}"
        return None
