"""The election of the leading controller, by the lease and by how long the lease was unchanged."""

from datetime import UTC, datetime

import pytest

from gpuvirt.kube.election import DURATION_S, Lease, LeaseSpec, claimed
from gpuvirt.kube.resources import Metadata

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
AT = "2026-01-02T03:04:05.678901Z"


def lease(allocated_to: str | None, transitions: int | None = None) -> Lease:
    held = LeaseSpec(allocated_to, 20, "earlier", "earlier", transitions)
    return Lease(Metadata("lease", "gpuvirt", resource_version="7"), held)


@pytest.mark.parametrize("allocated_to", [None, ""])
def test_a_free_lease_is_acquired_at_once(allocated_to: str | None) -> None:
    mine = claimed(lease(allocated_to, 3), "me", NOW, quiet_s=0.0)
    assert mine is not None
    assert mine.spec == LeaseSpec("me", DURATION_S, AT, AT, 3 if allocated_to is None else 4)
    assert mine.metadata.resource_version == "7", "without the version a concurrent write would not be refused"


def test_renewing_a_lease_keeps_its_acquire_time_and_transitions() -> None:
    mine = claimed(lease("me", 3), "me", NOW, quiet_s=0.0)
    assert mine is not None
    assert mine.spec == LeaseSpec("me", DURATION_S, "earlier", AT, 3)


def test_a_lease_of_another_controller_is_acquired_only_after_it_expires() -> None:
    assert claimed(lease("other"), "me", NOW, quiet_s=20.0) is None
    mine = claimed(lease("other", 1), "me", NOW, quiet_s=20.1)
    assert mine is not None
    assert (mine.spec.holder_identity, mine.spec.lease_transitions) == ("me", 2)
