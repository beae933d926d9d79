"""The names of vGPU types by the host's ids, as one version of the driver numbers them.

The VFs of a GPU list only types that can still be created, so a full GPU has vGPUs whose type no VF names.
"""

from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import LiveVgpu, UnnamedType


class TypeNames(msgspec.Struct, frozen=True):
    """The known names, and what nvidia-smi answered for GPUs whose types have none."""

    driver: str | None = None
    """The version of the driver; another version may give the ids to other types."""
    by_id: Mapping[str, VgpuType] = msgspec.field(default_factory=dict)
    answers: Mapping[PciAddress, str] = msgspec.field(default_factory=dict)
    """The answer for each GPU for which nvidia-smi was asked; an id that is not in `by_id` is in none of them."""

    def of(self, facts: Facts) -> "TypeNames":
        """Return the names of the host's present driver, none if these names are of another version."""
        version = facts.platform.nvidia_version
        return self if self.driver == version else TypeNames(version)

    def observing(self, facts: Facts) -> "TypeNames":
        """Return the names of the host's present driver, with those that its VFs list."""
        listed = {type_id: name for host in facts.vgpu_hosts.values() for type_id, name in host.type_names.items()}
        kept = self.of(facts)
        return replace(kept, by_id={**kept.by_id, **listed})

    def answered(self, gpu: PciAddress, table: Mapping[str, VgpuType] | Unread) -> "TypeNames":
        """Return the names with nvidia-smi's table of the types that a GPU supports, Unread if it could not be read."""
        if isinstance(table, Unread):
            return replace(self, answers={**self.answers, gpu: table.seen or table.detail})
        answer = f"{len(table)} types, none with this id"
        return replace(self, by_id={**table, **self.by_id}, answers={**self.answers, gpu: answer})

    def named(self, gpu: PciAddress, live: LiveVgpu) -> LiveVgpu:
        """Return a vGPU of a GPU with the name of its type, or with nvidia-smi's answer if the type has no name."""
        if not isinstance(live.type, UnnamedType):
            return live
        answer = self.answers.get(gpu, "")
        return replace(live, type=self.by_id.get(live.type.id) or live.type.after(answer))


NO_NAMES = TypeNames()

Learn = Callable[[Facts, TypeNames], TypeNames]
"""Returns the names of a host's vGPU types, by its facts and the names that are known."""


def observed_names(facts: Facts, known: TypeNames) -> TypeNames:
    """Return the known names with those that the VFs list; nvidia-smi is not asked."""
    return known.observing(facts)
