"""Announces withdrawals to the scheduler: the counts in the node's status fall before devices are withdrawn.

The scheduler counts devices by the node's status, which the kubelet writes every ten seconds. If the scheduler binds a
pod by an outdated count, the kubelet refuses the pod once its list of devices is shorter. So the node's status is
lowered first, and the list is shortened a moment later, when earlier bound pods are admitted. If the status can't be
written, a withdrawal waits for a few seconds only. When the kubelet counts further devices, the status is raised at
once.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.model.offers.offers import OfferedDevice, Offers


class Count(msgspec.Struct, frozen=True):
    """The limits of a count in the node's status: the devices that stay; at least those that the kubelet counts."""

    least: int
    most: int

    def corrected(self, count: int) -> int:
        """Return the count within the limits that is nearest to a count of the node's status."""
        return min(max(count, self.least), self.most)


def name_of(device: OfferedDevice) -> str:
    """Return the name under which a device is withdrawn: its vGPU's id, or its function's address."""
    return device.candidate.target.vgpu or device.candidate.carrier


def free_names(offers: Offers) -> frozenset[str]:
    """Return the names of the healthy offered devices."""
    return frozenset(name_of(device) for _, device in offers.devices() if device.health.healthy)


class Taken(msgspec.Struct, frozen=True):
    """The devices and ids that the kubelet takes from this agent; another device plugin may offer the other devices."""

    offers: Offers
    on_demand: Mapping[ResourceName, Collection[DeviceId]] = msgspec.field(default_factory=dict)
    """The healthy ids of on-demand resources."""


def counts(
    taken: Taken, withdrawing: frozenset[str], counted: Iterable[tuple[ResourceName, DeviceId]]
) -> Mapping[ResourceName, Count]:
    """Return the limits of each resource without those `withdrawing`; `counted` are the kubelet's healthy devices.

    The first vGPU of an on-demand GPU takes the ids of its other types at once, without notice: the node's status falls
    with the list.
    """
    of_kubelet = frozenset(counted)
    stay: dict[ResourceName, Collection[DeviceId]] = dict(taken.on_demand)
    for name, offer in taken.offers.by_resource.items():
        healthy = (device for device in offer.devices.values() if device.health.healthy)
        stay[name] = [device.id for device in healthy if name_of(device) not in withdrawing]
    return {name: Count(sum((name, id_) in of_kubelet for id_ in ids), len(ids)) for name, ids in stay.items()}


def is_known(counts: Mapping[ResourceName, Count], of_status: Mapping[ResourceName, int]) -> bool:
    """Return whether no count in a node's status is above its limit."""
    return all(of_status.get(name, 0) <= count.most for name, count in counts.items())


class NoticeTimes(msgspec.Struct, frozen=True):
    """How long withdrawals wait for the scheduler, and how long new devices are awaited."""

    notice_s: float
    """From when the scheduler no longer counts a device to its withdrawal."""
    notice_most_s: float
    """The longest wait for the scheduler before a withdrawal."""
    growth_s: float
    """How long the kubelet may take to count new devices."""


class Announcement(msgspec.Struct, frozen=True):
    """The announced withdrawals of one node. Times are in seconds of the monotonic clock."""

    counts: Mapping[ResourceName, Count] = msgspec.field(default_factory=dict)
    """The counts of resources that the node's status should have."""
    since_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    """When the withdrawal of each offered function or vGPU was announced."""
    known_since_s: float | None = None
    """Since when the scheduler counts none of these devices."""
    awaits_until_s: float = 0.0
    """Until when the kubelet may count new devices."""
    may_withdraw: frozenset[str] = frozenset()
    """The functions and vGPUs that may be withdrawn."""
    again_at_s: float | None = None
    """When the next of them may be withdrawn; None if none waits."""

    def awaits_new_devices(self, now_s: float) -> bool:
        """Return whether the kubelet may soon count further devices, which the node's status must show then."""
        return now_s < self.awaits_until_s and any(count.least < count.most for count in self.counts.values())


def announce(
    before: Announcement,
    withdrawing: frozenset[str],
    free: frozenset[str],
    times: NoticeTimes,
    now_s: float,
    *,
    known: bool,
) -> Announcement:
    """Return the announcement with those devices of `withdrawing` that may be withdrawn now: offered ones wait.

    `known`: whether the node's status counts none of them. An announced withdrawal waits its time even if its device
    fails or leaves meanwhile, and a withdrawn device is not announced again: `free` are the names of the last offers,
    so such a withdrawal would come or go one decision late.
    """
    announced = (withdrawing - before.may_withdraw) & (free | before.since_s.keys())
    since_s = {device: before.since_s.get(device, now_s) for device in announced}
    known_since_s = before.known_since_s if known and not since_s.keys() - before.since_s.keys() else None
    if known and known_since_s is None:
        known_since_s = now_s
    until_s = {device: _until_s(at_s, known_since_s, times) for device, at_s in since_s.items()}
    waiting_s = {device: at_s for device, at_s in until_s.items() if at_s > now_s}
    return replace(
        before,
        since_s=since_s,
        known_since_s=known_since_s,
        may_withdraw=withdrawing - waiting_s.keys(),
        again_at_s=min(waiting_s.values(), default=None),
    )


def _until_s(since_s: float, known_since_s: float | None, times: NoticeTimes) -> float:
    """Return when a device may be withdrawn."""
    most_s = since_s + times.notice_most_s
    return most_s if known_since_s is None else min(most_s, max(since_s, known_since_s) + times.notice_s)


def with_counts(
    before: Announcement,
    taken: Taken,
    withdrawing: frozenset[str],
    counted: Iterable[tuple[ResourceName, DeviceId]],
    times: NoticeTimes,
    now_s: float,
) -> Announcement:
    """Return the announcement with the counts by the offers without those `withdrawing`, and the kubelet's count."""
    now = counts(taken, withdrawing, counted)
    grows = any(count.most > before.counts.get(name, Count(0, 0)).most for name, count in now.items())
    return replace(before, counts=now, awaits_until_s=now_s + times.growth_s if grows else before.awaits_until_s)
