"""The kubelet of a host, as its files show it."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gpuvirt.facts.pci import Unread


class KubeletConfig(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The fields of the kubelet's configuration that decide on which NUMA nodes a VM's processors and memory are."""

    cpu_manager_policy: str = "none"
    memory_manager_policy: str = "None"
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"


@dataclass(frozen=True, slots=True)
class KubeletFacts:
    """The contents of the kubelet's folder. Paths are those of this process."""

    folder: str
    socket: str
    listens: bool | Unread
    """Whether the kubelet's socket exists."""
    config_file: str
    config: KubeletConfig | Unread | None
    counted_by: str
    """The source of `counted`: the kubelet's API, or its checkpoint."""
    counted: Mapping[str, frozenset[str]] | Unread | None
    """The healthy devices of each resource, as the kubelet reports them or has recorded them last; None if it has
    recorded none."""

    @property
    def ever_ran(self) -> bool:
        """Whether a kubelet runs on the host, or has left files there."""
        return self.listens is not False or self.config is not None or self.counted is not None
