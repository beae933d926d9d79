"""The kubelet of a host, as its files say it."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from gpuvirt.facts.pci import Unread


class KubeletConfig(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """What of the kubelet's configuration decides where a machine's processors and memory are."""

    cpu_manager_policy: str = "none"
    memory_manager_policy: str = "None"
    topology_manager_policy: str = "none"
    topology_manager_scope: str = "container"


@dataclass(frozen=True, slots=True)
class KubeletFacts:
    """What its folder holds. Paths are those by which this process found them."""

    folder: str
    socket: str
    listens: bool | Unread
    """Whether its socket is there."""
    config_file: str
    config: KubeletConfig | Unread | None
    counted_by: str
    """Where that was found which it counts: its API, or its checkpoint."""
    counted: Mapping[str, frozenset[str]] | Unread | None
    """The healthy devices of each resource, by its own word or as it wrote them down last; None where there is none."""

    @property
    def ever_ran(self) -> bool:
        """Whether anything tells of a kubelet here."""
        return self.listens is not False or self.config is not None or self.counted is not None
