"""The vGPUs that were created or changed since the last scan of the host began, which the scan may not show."""

from collections.abc import Iterable, Mapping
from typing import Self

import msgspec

from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.facts.snapshot import Facts, with_vgpu, with_vgpu_host
from gpuvirt.facts.vgpu import LiveVgpu, VgpuHost
from gpuvirt.model.allocation.ledger import Entry


class CreatedVgpu(msgspec.Struct, frozen=True):
    """A vGPU that Allocate has created."""

    gpu: PciAddress
    live: LiveVgpu
    cdevs: tuple[str, ...]
    """The iommufd nodes of its VF."""
    at_s: float


class RecentVgpus(msgspec.Struct, frozen=True):
    """The vGPUs that were created or changed since the last scan began."""

    created: Mapping[VgpuId, CreatedVgpu] = msgspec.field(default_factory=dict)
    hosts: Mapping[PciAddress, tuple[VgpuHost, float]] = msgspec.field(default_factory=dict)
    """The GPUs whose vGPUs were changed, as observed after the last step, with the times."""

    def since(self, began_s: float, entries: Iterable[Entry]) -> Self:
        """Return the changes that a scan begun at `began_s` may not show; `entries` are all allocations."""
        hosts = {gpu: changed for gpu, changed in self.hosts.items() if changed[1] >= began_s}
        created = {
            vgpu: made
            for vgpu, made in self.created.items()
            if made.at_s >= began_s or (made.gpu in hosts and _is_allocated(vgpu, entries))
        }
        return type(self)(created, hosts)

    def with_created(self, vgpu: CreatedVgpu) -> Self:
        """Return this with one vGPU more."""
        return type(self)({**self.created, vgpu.live.id: vgpu}, self.hosts)

    def with_changed(self, host: VgpuHost, at_s: float, entries: Iterable[Entry]) -> Self:
        """Return this with the vGPUs of a GPU as a change has left them.

        The change has read them before its end, and may lack a vGPU that was created since. It has not removed that
        one, which is allocated.
        """
        created = {
            vgpu: made for vgpu, made in self.created.items() if made.gpu != host.gpu or _is_allocated(vgpu, entries)
        }
        return type(self)(created, {**self.hosts, host.gpu: (host, at_s)})

    def on(self, facts: Facts) -> Facts:
        """Return a scan's facts, with the changes that the scan may not show."""
        for host, _ in self.hosts.values():
            facts = with_vgpu_host(facts, host)
        return self.created_on(facts)

    def created_on(self, facts: Facts) -> Facts:
        """Return facts with the created vGPUs."""
        for made in self.created.values():
            facts = with_vgpu(facts, made.gpu, made.live, made.cdevs)
        return facts


def _is_allocated(vgpu: VgpuId, entries: Iterable[Entry]) -> bool:
    return any(entry.target.vgpu == vgpu for entry in entries)
