"""Writes the file by which NVIDIA's driver is told vGPU schedulers for good, and no file of anybody else's."""

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.hardware.platform import read_modprobe
from gpuvirt.model.moduleoption import FILE, in_the_way, merge
from gpuvirt.model.reasons import Reason
from gpuvirt.model.scheduling import registry_value
from gpuvirt.node.files import replace_file
from gpuvirt.paths import HostRoots


def persist(kernel: Kernel, roots: HostRoots, gpu: PciAddress, wanted: Scheduler | None) -> tuple[Reason, ...]:
    """Have a GPU's scheduler set whenever the driver is loaded, or with None no more; return why nothing was written.

    Raises DamagedError where our file has somebody else's lines, OSError where it can't be read or written.
    """
    obstacles = in_the_way(read_modprobe(kernel), gpu) if wanted is not None else ()
    if obstacles:
        return obstacles
    path = roots.local(FILE)
    existing = path.read_text() if path.exists() else None
    text = merge(existing, gpu, registry_value(wanted) if wanted is not None else None)
    if text is None:
        path.unlink(missing_ok=True)
    elif text != existing:
        replace_file(path, text.encode(), mode=0o644)
    return ()
