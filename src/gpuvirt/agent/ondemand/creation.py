"""Creates one vGPU for a pod: the write in a process that can be abandoned, and the vGPU as the host then shows it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.steps.leasing import RefusedError, what_failed
from gpuvirt.errors import VgpuUnavailableError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.sysfs import device_path
from gpuvirt.facts.vgpu import Framework, LiveVgpu, VgpuHost
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.functions import iommu
from gpuvirt.hardware.vgpu import mdev, vendor_vfio
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.steps import CreateVgpu
from gpuvirt.model.change.vgpus.gpustate import is_mig
from gpuvirt.model.offers.ondemand.choice import VgpuPlace
from gpuvirt.model.reasons import Seen, refusals


class Creation(msgspec.Struct, frozen=True):
    """A vGPU that was created."""

    live: LiveVgpu
    cdevs: tuple[str, ...] = ()
    """The own nodes of the VF, which the kernel has made with the vGPU: `vfio0`. A VM with iommufd needs them."""
    host: VgpuHost | None = None
    """The GPU as its driver shows it after the creation of a MIG-backed vGPU; None for others, and where it could not
    be read."""


def create(
    change_host: ChangeHost,
    locks: Sequence[int],
    functions: Mapping[PciAddress, PciFunction],
    place: VgpuPlace,
    step: CreateVgpu,
) -> Creation:
    """Create a vGPU in its place; raise RefusedError. The process of the write keeps `locks` open.

    `functions` are those of the host. The kernel may block the write, and then this call.
    """
    with ExitStack() as stack:
        kernel: Kernel = change_host.kernel
        if change_host.children is not None:
            kernel, _ = stack.enter_context(change_host.children(locks))
        try:
            if place.host.framework is Framework.MDEV:
                # The agent may not have observed a vGPU yet whose creation the kernel had blocked.
                mdev.verify_room(kernel, step.parent, step.type)
            backend_of(place.host.framework).create(kernel, step.parent, step.type, step.vgpu)
        except (OSError, VgpuUnavailableError) as error:
            raise RefusedError(refusals.failed(step.text, place.gpu, what_failed(error))) from error
    live = _created(change_host.kernel, place, step)
    return Creation(
        live,
        _cdevs(change_host.kernel, place),
        _host_after(change_host.kernel, functions, place.host) if is_mig(step.type) else None,
    )


def _cdevs(kernel: Kernel, place: VgpuPlace) -> tuple[str, ...]:
    if place.host.framework is Framework.MDEV:
        return ()  # a mediated device is opened by its group
    found, nodes = iommu.read_cdevs(kernel, device_path(place.parent.address)), iommu.read_cdev_nodes(kernel)
    if isinstance(found, Unread) or isinstance(nodes, Unread) or not nodes.issuperset(found):
        return ()  # unknown: the VM opens the group, until a scan has read the nodes
    return found


def _host_after(kernel: Kernel, functions: Mapping[PciAddress, PciFunction], before: VgpuHost) -> VgpuHost | None:
    """Return a GPU's vGPUs, and what its driver lists now: no number tells in advance whether an instance is left."""
    gpu = functions[before.gpu]
    of_gpu = {address: functions[address] for address in (gpu.address, *gpu.virtfns) if address in functions}
    probe = backend_of(before.framework).probe(kernel, of_gpu, {before.gpu: before}, brief=False)
    return None if isinstance(probe, Unread) else probe.hosts.get(before.gpu)  # unknown: a scan follows


def _created(kernel: Kernel, place: VgpuPlace, step: CreateVgpu) -> LiveVgpu:
    """Return the new vGPU; raise RefusedError where the host does not show it as it was requested."""
    if place.host.framework is Framework.MDEV:
        live = mdev.read_new(kernel, step.vgpu, step.parent)
    else:
        live = vendor_vfio.read_new(kernel, place.parent, place.host)
    for found in (live.type, live.group) if live is not None else ():
        if isinstance(found, Unread):
            raise RefusedError(refusals.unread(step.vgpu, found))
    if live is None:
        raise RefusedError(refusals.failed(step.text, place.gpu, Seen.absent(str(step.vgpu))))
    if live.type != step.type:
        raise RefusedError(refusals.failed(step.text, place.gpu, Seen(str(step.vgpu), f"its type is {live.type}")))
    if live.group is None:
        raise RefusedError(refusals.no_group(step.vgpu))
    return live
