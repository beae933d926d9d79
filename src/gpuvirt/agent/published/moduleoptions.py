"""Writes the modprobe file that sets the vGPU schedulers of NVIDIA's driver permanently."""

from collections.abc import Mapping

from gpuvirt.agent.store.files import replace_file
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.vgpu import Scheduler
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.host.platform import read_modprobe
from gpuvirt.model.change.moduleoption import FILE, conflicting_options, kept, merge
from gpuvirt.model.change.vgpus.scheduling import registry_scheduler, registry_value
from gpuvirt.model.reasons import Reason
from gpuvirt.paths import HostRoots


def persist(kernel: Kernel, roots: HostRoots, gpu: PciAddress, desired: Scheduler | None) -> tuple[Reason, ...]:
    """Set a GPU's scheduler for each load of the driver, or remove the setting (None); return why it was not written.

    Raises DamagedError if gpuvirt's file has lines that gpuvirt has not written, and OSError.
    """
    obstacles = conflicting_options(read_modprobe(kernel), gpu) if desired is not None else ()
    if obstacles:
        return obstacles
    path = roots.local(FILE)
    existing = path.read_text() if path.exists() else None
    text = merge(existing, gpu, registry_value(desired) if desired is not None else None)
    if text is None:
        path.unlink(missing_ok=True)
    elif text != existing:
        replace_file(path, text.encode(), mode=0o644)
    return ()


def read_kept(roots: HostRoots) -> Mapping[PciAddress, Scheduler]:
    """Return the schedulers in gpuvirt's file; raise DamagedError if it has lines of other programs, and OSError."""
    path = roots.local(FILE)
    values = kept(path.read_text()) if path.exists() else {}
    found = {gpu: registry_scheduler(value) for gpu, value in values.items()}
    return {gpu: scheduler for gpu, scheduler in found.items() if scheduler is not None}
