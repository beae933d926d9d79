"""Plans the vGPUs of a GPU in mode `on-demand`: removes those without a pod, and restores those of before a reboot.

Allocate creates all others, so a plan never creates a vGPU that no pod has.
"""

from collections.abc import Iterator

from gpuvirt.facts.pci import Unread
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.change.steps import CreateVgpu, RemoveVgpu
from gpuvirt.model.change.vgpus import modes
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.places import VgpuPlaces
from gpuvirt.model.reasons import Reason, refusals, shortfalls


def plan(gpu_state: GpuState, desired: DesiredVgpus) -> VgpuPlan:
    """Return the plan of a GPU: a vGPU that is allocated, or that a process has open, stays."""
    gpu, live = gpu_state.host.gpu, gpu_state.host.live
    refused = tuple(_refusals(gpu_state, desired))
    if refused:
        return VgpuPlan(gpu, refusals=refused)
    free = [vgpu for vgpu in live if vgpu.id not in gpu_state.users]
    orphans = [vgpu for vgpu in live if vgpu.id in gpu_state.users and vgpu.id not in gpu_state.allocated]
    undesired = frozenset(vgpu.id for vgpu in (*free, *orphans))
    removes = tuple(RemoveVgpu(vgpu.id, vgpu.type, vgpu.parent) for vgpu in free if not isinstance(vgpu.type, Unread))
    pending = [shortfalls.vgpu_in_use(vgpu, gpu_state.users[vgpu.id]) for vgpu in orphans]
    pending += [refusals.unbind_pending(gpu, (), vgpu=vgpu) for vgpu in sorted(gpu_state.leaving)]
    switches = modes.switches(gpu_state, {}, desired)
    if switches and len(free) == len(live) and not gpu_state.leaving:
        return VgpuPlan(gpu, (*removes, *switches), undesired=undesired)
    if switches:
        staying = (vgpu for vgpu in live if vgpu.id in gpu_state.users)
        pending += [shortfalls.vgpu_keeps_mode(vgpu, gpu_state.users[vgpu.id], switches[0].text) for vgpu in staying]
    return VgpuPlan(gpu, (*removes, *_restores(gpu_state)), tuple(pending), undesired=undesired)


def _refusals(gpu_state: GpuState, desired: DesiredVgpus) -> Iterator[Reason]:
    for unread in gpu_state.host.unread:
        yield refusals.unread(gpu_state.host.gpu, unread)
    for vgpu in gpu_state.host.live:
        if isinstance(vgpu.type, Unread):
            yield refusals.unread(vgpu.id, vgpu.type)
    yield from modes.refuse(gpu_state, {}, desired)


def _restores(gpu_state: GpuState) -> Iterator[CreateVgpu]:
    """Yield the steps that create the vGPUs of pods again which a reboot has removed, with their ids."""
    places = VgpuPlaces(gpu_state, {})
    for vgpu, vgpu_type in gpu_state.lost.items():
        if (step := places.create_again(vgpu, vgpu_type)) is not None:
            yield step
