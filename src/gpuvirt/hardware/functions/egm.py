"""Extended GPU memory (Grace Hopper, GB200): the regions under `/sys/class/egm` and the GPUs that they belong to."""

import re
from collections.abc import Sequence

from gpuvirt.facts.ids import parse_pci_address
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.snapshot import EgmRegion
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu
from gpuvirt.paths import HostPath

CLASS = HostPath("/sys/class/egm")
_REGION = re.compile(r"egm[0-9]+")


def read_regions(kernel: Kernel, before: Sequence[EgmRegion] = ()) -> tuple[tuple[EgmRegion, ...], tuple[Unread, ...]]:
    """Return the regions in the order of their nodes, and the files that could not be read.

    A region that could not be read is taken from `before`. A region without a node is left out: a VM could not open it.
    """
    names = attributes.names(kernel, CLASS)
    if isinstance(names, Unread):
        return tuple(before), (names,)
    regions: list[EgmRegion] = []
    unread: list[Unread] = []
    for name in names or ():
        if not _REGION.fullmatch(name):
            continue
        path, node = HostPath(f"{CLASS}/{name}/gpu_devices"), HostPath(f"/dev/{name}")
        gpus = attributes.parsed(kernel, path, lambda text: frozenset(map(parse_pci_address, text.split())))
        exists = iommu.exists(kernel, node)
        if isinstance(gpus, Unread) or isinstance(exists, Unread):
            unread += (found for found in (gpus, exists) if isinstance(found, Unread))
            regions += (region for region in before if region.node == node)
        elif gpus and not exists:
            unread.append(Unread(node, seen="no node for this region"))
        elif gpus:
            regions.append(EgmRegion(node, gpus))
    return tuple(regions), tuple(unread)
