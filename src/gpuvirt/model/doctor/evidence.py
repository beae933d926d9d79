"""All that checks look at: the host, what its devices mean, the agent's picture, the kubelet, KubeVirt."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.kubelet import KubeletFacts
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.platform import FunctionSetup
from gpuvirt.facts.setup import Setup
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.doctor.kubevirt import KubeVirt
from gpuvirt.model.inventory.inventory import Gpu, Inventory
from gpuvirt.model.offers.view import NodeView


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence."""

    setup: Setup
    inventory: Inventory
    view: NodeView
    """As `gpuvirt devices` shows it."""
    settings: Settings
    kubelet: KubeletFacts
    kubevirts: tuple[KubeVirt, ...] | None = None
    """None where nobody has shown us any."""

    @property
    def cmdline(self) -> tuple[str, ...]:
        """The kernel's arguments, those after `--` left out, which are init's."""
        words = (self.setup.cmdline.text or "").split()
        return tuple(words[: words.index("--")] if "--" in words else words)

    def argument(self, name: str) -> str | None:
        """Return what `name=` was last given on the kernel's command line, "" for the bare word."""
        found = [word.partition("=")[2] for word in self.cmdline if word.partition("=")[0] == name]
        return found[-1] if found else None

    @property
    def on_vfio(self) -> tuple[Gpu, ...]:
        """The GPUs that a VFIO driver has."""
        return tuple(gpu for gpu in self.inventory.gpus.values() if gpu.function.on_vfio)

    def looked_at(self) -> Iterator[tuple[Gpu, FunctionSetup]]:
        """Yield the GPUs with what was looked at more closely."""
        for address, gpu in self.inventory.gpus.items():
            if (setup := self.setup.functions.get(address)) is not None:
                yield gpu, setup

    def function(self, address: PciAddress) -> PciFunction | None:
        """Return a function of this host."""
        return self.inventory.facts.functions.get(address)
