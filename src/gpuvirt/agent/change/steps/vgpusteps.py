"""Takes the steps of a plan for one GPU's vGPUs, each after verifying that no process uses the touched devices."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from gpuvirt.agent.change.changehost import ChangeHost, ReportStep
from gpuvirt.agent.change.steps import proving
from gpuvirt.agent.change.steps.changerecord import recorded_unbind
from gpuvirt.agent.change.steps.changes import Change
from gpuvirt.agent.change.steps.leasing import GroupClaim, InUseError, RefusedError, leased, what_failed
from gpuvirt.errors import VfsUnchangedError, VgpuUnavailableError
from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId, VgpuType
from gpuvirt.facts.pci import PciFunction, Unread
from gpuvirt.facts.sysfs import mdev_path
from gpuvirt.facts.vgpu import Framework, GpuModes, LiveVgpu, VgpuHost
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, UnprovenError
from gpuvirt.hardware.access.tools import ToolError
from gpuvirt.hardware.functions import iommu, sriov
from gpuvirt.hardware.programs import nvidiasmi, vgpuscheduler
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.plan import Scope, StepScope, VgpuPlan
from gpuvirt.model.change.steps import (
    CreateInstance,
    CreateVgpu,
    DestroyInstance,
    DisableVfs,
    EnableVfs,
    RemoveVgpu,
    SetMigMode,
    SetMixedSizes,
    SetScheduler,
    VgpuStep,
)
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.reasons import Reason, Seen, refusals, shortfalls
from gpuvirt.model.reasons.shortfalls import OTHER_MAKERS

MOST_ROUNDS = 6
"""The most rounds of a phase: one for VFs, one for vGPUs, and one for each VF that refuses a type."""


class TypeRejectedError(RefusedError):
    """A VF has refused a vGPU type that it had offered; another VF may accept it."""

    def __init__(self, parent: PciAddress, reason: Reason) -> None:
        super().__init__(reason)
        self.parent = parent


class VgpusInUseError(RefusedError):
    """vGPUs that the plan removes are in use by processes that were not observed; the plan's others are removed."""

    def __init__(self, held: Mapping[VgpuId, InUseError]) -> None:
        super().__init__(next(iter(held.values())).reason)
        self.users: Mapping[VgpuId, str] = {vgpu: error.who for vgpu, error in held.items()}


class SchedulerRefusedError(RefusedError):
    """The scheduler could not be set; the vGPUs are as desired."""


class Run(msgspec.Struct, frozen=True):
    """The steps that one change takes."""

    report: ReportStep
    change: Change
    taken: list[VgpuStep] = msgspec.field(default_factory=list)
    """The steps that were begun."""

    @contextlib.contextmanager
    def step(self, scope: StepScope, step: VgpuStep) -> Iterator[None]:
        """Run a step; raise StalePlanError instead if the plan of the change is outdated."""
        with self.change.step(scope, step.text):
            self.taken.append(step)
            self.report(step)
            yield


def take_all(
    change_host: ChangeHost, inventory: Inventory, gpu_state: GpuState | None, plan: VgpuPlan, run: Run
) -> None:
    """Take all steps of a plan; raise RefusedError at the first step that can't be taken or has no effect.

    If some of the vGPUs to remove turn out to be in use, the others are removed first, then VgpusInUseError is raised.
    The change refuses allocated devices before they are leased.
    """
    held: dict[VgpuId, InUseError] = {}
    scopes = [_scope(inventory, gpu_state, step, plan.gpu) for step in plan.steps]
    if not scopes:
        return
    run.change.claim(scopes[0].with_all(scopes[1:]))
    for step, scope in zip(plan.steps, scopes, strict=True):
        if held and not isinstance(step, RemoveVgpu):
            break
        try:
            with run.step(scope, step):
                _take(change_host, inventory, gpu_state, step)
        except InUseError as error:
            if isinstance(step, SetScheduler):
                raise SchedulerRefusedError(error.reason) from error
            if not isinstance(step, RemoveVgpu):
                raise
            held[step.vgpu] = error
        except (OSError, ToolError, VfsUnchangedError, VgpuUnavailableError, UnprovenError) as error:
            reason = refusals.failed(step.text, plan.gpu, what_failed(error))
            raise (SchedulerRefusedError if isinstance(step, SetScheduler) else RefusedError)(reason) from error
    if held:
        raise VgpusInUseError(held)


def _scope(inventory: Inventory, gpu_state: GpuState | None, step: VgpuStep, gpu: PciAddress) -> StepScope:
    """Return what a step touches. Every step asks whether a pod has its GPU whole, or a part that is not a vGPU.

    A new vGPU takes its place: its VF, or the id of the mediated device. A step on GPU instances or the scheduler takes
    no device that a pod can be given: NVIDIA's driver refuses it for an instance in use.
    """
    asked = frozenset({gpu})
    framework = gpu_state.host.framework if gpu_state is not None else Framework.MDEV
    match step:
        case EnableVfs() | DisableVfs() | SetMixedSizes() | SetMigMode():
            return StepScope.of({gpu, *inventory.facts.functions[gpu].virtfns})
        case RemoveVgpu(vgpu, _, parent) | CreateVgpu(vgpu, _, parent):
            if framework is Framework.MDEV:
                return StepScope(asked, Scope(vgpus=frozenset({vgpu})))
            vfs = inventory.facts.functions[gpu].virtfns
            places = frozenset(vfs if framework is Framework.SRIOV_VF else (parent,))
            return StepScope(asked, Scope(places, frozenset({vgpu})))
        case DestroyInstance() | CreateInstance() | SetScheduler():
            return StepScope(asked)


def _take(change_host: ChangeHost, inventory: Inventory, gpu_state: GpuState | None, step: VgpuStep) -> None:
    match step:
        case EnableVfs(gpu):
            _switch_vfs(change_host, inventory, sriov.switch_on(change_host.kernel, gpu))
        case DisableVfs(gpu):
            verify_vfs_removable(change_host.kernel, inventory, gpu)
            _verify_empty(change_host.kernel, gpu)
            _switch_vfs(change_host, inventory, sriov.switch_off(change_host.kernel, gpu))
        case RemoveVgpu(vgpu):
            if gpu_state is not None:
                _remove(change_host.kernel, inventory, gpu_state.host, vgpu)
        case CreateVgpu(vgpu, vgpu_type, parent):
            if gpu_state is not None:
                _create(change_host.kernel, gpu_state.host, parent, vgpu_type, vgpu)
        case SetMixedSizes() | SetMigMode() | DestroyInstance() | CreateInstance() | SetScheduler():
            _run_nvidia_smi(change_host, inventory, gpu_state, step)


def _run_nvidia_smi(
    change_host: ChangeHost,
    inventory: Inventory,
    gpu_state: GpuState | None,
    step: SetMixedSizes | SetMigMode | DestroyInstance | CreateInstance | SetScheduler,
) -> None:
    """Take a step that nvidia-smi takes."""
    kernel, tools = change_host.kernel, change_host.tools
    match step:
        case SetMixedSizes(gpu, on):
            _verify_empty(kernel, gpu)
            nvidiasmi.set_mixed_sizes(tools, gpu, _unused(kernel, gpu, step.text), on=on)
            modes = nvidiasmi.read_modes(tools, gpu)
            _verify_mode(step, modes, found=modes.mixed_sizes)
        case SetMigMode(gpu, on):
            _verify_empty(kernel, gpu)
            nvidiasmi.set_mig_mode(tools, gpu, _unused(kernel, gpu, step.text), on=on)
            modes = nvidiasmi.read_modes(tools, gpu)
            if modes.mig is not on and modes.mig_pending is on:
                raise RefusedError(shortfalls.mode_pending(gpu, on=on))
            _verify_mode(step, modes, found=modes.mig)
        case DestroyInstance(gpu, instance):
            _verify_no_new_vgpu(kernel, gpu, gpu_state)
            nvidiasmi.destroy_instance(tools, gpu, instance, proving.driver_answers(kernel, gpu, step.text))
        case CreateInstance(gpu, profile, start):
            nvidiasmi.create_instance(tools, gpu, profile, start)
        case SetScheduler(gpu, scheduler):
            arguments = vgpuscheduler.read_arguments(tools, scheduler)
            answered = proving.driver_answers(kernel, gpu, step.text)
            opened = proving.vgpus_walked(kernel, gpu, _claims_of_live(kernel, inventory, gpu))
            vgpuscheduler.set_scheduler(tools, gpu, scheduler, arguments, Proof.joined(opened, answered))


def _unused(kernel: Kernel, gpu: PciAddress, step: str) -> Proof:
    """Prove that no process uses a GPU, for a step by which NVIDIA's tool changes the whole GPU; raise RefusedError."""
    answered = proving.driver_answers(kernel, gpu, step)
    return Proof.joined(proving.walked(kernel, [gpu], answered=True), answered)


def _claims_of_live(kernel: Kernel, inventory: Inventory, gpu: PciAddress) -> list[GroupClaim]:
    """Return the groups of all vGPUs that a GPU carries now."""
    host = scan(kernel).vgpu_hosts.get(gpu)
    if host is None:
        return []
    return [claim for live in host.live for claim in claims(kernel, inventory, host, live)]


def _verify_mode(step: SetMixedSizes | SetMigMode, modes: GpuModes, *, found: bool | Unread | None) -> None:
    """Verify that a mode was switched: nvidia-smi may exit with 0 without switching it."""
    if isinstance(found, Unread) or bool(found) is not step.on:
        seen = Seen(found.path, found.detail) if isinstance(found, Unread) else Seen("nvidia-smi -q", str(modes))
        raise RefusedError(refusals.failed(step.text, step.gpu, seen))


def _verify_empty(kernel: Kernel, gpu: PciAddress) -> None:
    """Verify that a GPU carries no vGPU: one may have been created since the plan."""
    if live := _live(kernel, gpu):
        raise RefusedError(_not_empty(gpu, sorted(live)))


def _verify_no_new_vgpu(kernel: Kernel, gpu: PciAddress, gpu_state: GpuState | None) -> None:
    """Verify that no vGPU was created since the plan: it may use the GPU instance that is to be destroyed."""
    known = {vgpu.id for vgpu in gpu_state.host.live} if gpu_state is not None else set()
    if new := _live(kernel, gpu) - known:
        raise RefusedError(_not_empty(gpu, sorted(new)))


def _live(kernel: Kernel, gpu: PciAddress) -> set[VgpuId]:
    host = scan(kernel).vgpu_hosts.get(gpu)
    return {vgpu.id for vgpu in host.live} if host is not None else set()


def _switch_vfs(change_host: ChangeHost, inventory: Inventory, switch: sriov.VfSwitch) -> None:
    """Switch the VFs of a GPU, and verify before that no process uses the GPU or one of them.

    NVIDIA's `sriov-manage` takes the GPU from its driver for a moment.
    """
    gpu = switch.gpu
    answered = switch.by_nvidia and inventory.facts.functions[gpu].driver == proving.NVIDIA_DRIVER
    functions = (gpu, *inventory.facts.functions[gpu].virtfns)
    with recorded_unbind(change_host.kernel, change_host.original_drivers, gpu, inventory.facts.platform.boot_id):
        proof = proving.walked(change_host.kernel, functions, answered=answered)
        sriov.switch_vfs(change_host.kernel, change_host.tools, switch, proof)


def verify_vfs_removable(kernel: Kernel, inventory: Inventory, gpu: PciAddress) -> None:
    """Verify that no VF is bound to a VFIO driver, and that no process uses the GPU or a VF; raise RefusedError.

    A VF on a VFIO driver has a device node, which a process could open at any moment.
    """
    functions = inventory.facts.functions
    found = [functions.get(parent) for parent in functions[gpu].virtfns]
    vfs = [vf for vf in found if vf is not None]
    if len(vfs) < len(found) or any(vf.on_vfio for vf in vfs):
        raise RefusedError(refusals.vfs_enabled(functions[gpu]))
    proving.walked(kernel, (gpu, *(vf.address for vf in vfs)), answered=functions[gpu].driver == proving.NVIDIA_DRIVER)


def _remove(kernel: Kernel, inventory: Inventory, host: VgpuHost, vgpu: VgpuId) -> None:
    live = next(live for live in host.live if live.id == vgpu)
    backend = backend_of(host.framework)
    functions = (host.gpu, *inventory.facts.functions[host.gpu].virtfns)
    is_set = host.framework is Framework.SRIOV_VF  # a lease does not keep processes from a device on a native driver
    with contextlib.ExitStack() as held:
        leases = [held.enter_context(leased(kernel, claim)) for claim in claims(kernel, inventory, host, live)]
        backend.verify_same(kernel, live)
        proofs = [prove() for prove in leases]
        walk = [proving.walked(kernel, functions)] if is_set else []
        backend.remove(kernel, live, Proof.joined(*walk, *proofs))


def claims(kernel: Kernel, inventory: Inventory, host: VgpuHost, live: LiveVgpu) -> Iterator[GroupClaim]:
    """Yield what must be leased while a vGPU is removed."""
    if host.framework is Framework.MDEV:
        yield _claim(live.id, live.id, live.group, iommu.read_cdevs(kernel, mdev_path(live.id)))
        return
    functions = inventory.facts.functions
    parents = functions[host.gpu].virtfns if host.framework is Framework.SRIOV_VF else (live.parent,)
    for parent in parents:
        function: PciFunction | None = functions.get(parent)
        if function is None:
            raise RefusedError(refusals.unread_function(parent))
        if host.framework is Framework.VENDOR_VFIO or function.on_vfio:
            yield _claim(parent, live.id, function.iommu_group, function.cdevs)


def _claim(
    subject: str, vgpu: VgpuId, group: IommuGroup | Unread | None, cdevs: tuple[str, ...] | Unread
) -> GroupClaim:
    if not isinstance(group, int):
        raise RefusedError(refusals.no_group(subject) if group is None else refusals.unread(subject, group))
    if isinstance(cdevs, Unread):  # a VM may have the device open by a node of unknown name
        raise RefusedError(refusals.unread(subject, cdevs))
    return GroupClaim(subject, group, cdevs, (vgpu,))


def _create(kernel: Kernel, host: VgpuHost, parent: PciAddress, vgpu_type: VgpuType, vgpu: VgpuId) -> None:
    try:
        backend_of(host.framework).create(kernel, parent, vgpu_type, vgpu)
    except OSError as error:
        if host.framework is not Framework.VENDOR_VFIO:
            raise
        reason = shortfalls.type_rejected(parent, what_failed(error))
        raise TypeRejectedError(parent, reason) from error


def _not_empty(gpu: PciAddress, existing: Sequence[str]) -> Reason:
    """A vGPU has been created since the plan."""
    return refusals.failed(f"other vGPUs have just been created on it: {', '.join(existing)}", gpu, fix=OTHER_MAKERS)
