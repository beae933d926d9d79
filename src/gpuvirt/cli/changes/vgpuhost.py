"""The host of a `gpuvirt vgpu` command, and the changes of its vGPUs."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import typer
from msgspec.structs import replace

from gpuvirt.agent.change import byhand
from gpuvirt.agent.change.observation import HostObservation, observe
from gpuvirt.cli.changes import vfiohost
from gpuvirt.cli.changes.inworker import beside, changed_in_worker, in_worker, step_reporter
from gpuvirt.cli.changes.vfiohost import Host
from gpuvirt.cli.output.vgpurender import VgpuResult
from gpuvirt.facts.ids import PciAddress, VgpuId
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.paths import HostRoots


def host(host_root: Path, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> Host:
    """Return the host of a command, with the reader of its allocations."""
    account = vfiohost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    return vfiohost.host(account)


def gpu_states(seen: HostObservation) -> Mapping[PciAddress, GpuState]:
    """Return the states of the GPUs that can carry vGPUs now."""
    found = {gpu: seen.gpu_state(gpu) for gpu in sorted(seen.inventory.gpus)}
    return {gpu: state for gpu, state in found.items() if state is not None}


def gpus_named(seen: HostObservation, addresses: Iterable[str]) -> list[PciAddress]:
    """Return the GPUs that addresses name; raise BadParameter for an address that is no GPU."""
    found = list(vfiohost.parsed(addresses))
    for address in found:
        if address not in seen.inventory.gpus:
            raise typer.BadParameter(f"{address} is no GPU of this host (gpuvirt devices)")
    return found


def would(seen: HostObservation, gpu: PciAddress, desired: DesiredGpu) -> VgpuResult:
    """Return the expected result of a change of a GPU."""
    unit = {gpu: desired}
    plan = plan_unit(seen.unit_state(unit), seen.inventory.gpus[gpu].unit, unit)
    steps = (*(step.text for step in plan.steps), *plan.later)
    return VgpuResult(gpu, steps, plan.reasons, _desired(desired))


def changed(here: Host, seen: HostObservation, gpu: PciAddress, desired: DesiredGpu, *, quiet: bool) -> VgpuResult:
    """Change a GPU to its desired state, and return the result; `seen` has the GPU's isolation unit."""
    if (managed := _managed(here, gpu, _desired(desired))) is not None:
        return managed
    unit = seen.inventory.gpus[gpu].unit
    plan = plan_unit(seen.unit_state({gpu: desired}), unit, {gpu: desired})
    takes_away = bool(plan.drivers.steps) or any(phase.destroys for phase in plan.vgpus)
    intent = next((step.text for step in plan.steps), None) if takes_away else None
    taken, outcome = changed_in_worker(here.command_host, unit, {gpu: desired}, seen.inventory, intent, quiet=quiet)
    return VgpuResult(gpu, taken, outcome.reasons, _desired(desired))


def with_vfs_bound(here: Host, result: VgpuResult, *, quiet: bool, dry_run: bool) -> VgpuResult:
    """Bind the new VFs of a GPU to a VFIO driver, and return the result of both changes."""
    gpu = result.gpu
    if dry_run:
        return replace(result, steps=(*result.steps, f"{gpu}: bind its VFs to a VFIO driver, for VMs"))
    seen = observe(here.change_host, here.inputs, [])
    unit, vfs = seen.inventory.gpus[gpu].unit, seen.inventory.facts.functions[gpu].virtfns
    desired = dict.fromkeys(vfs, DesiredGpu(DesiredDriver.PASSTHROUGH))
    intent = next((step.text for step in plan_unit(seen.unit_state(desired), unit, desired).steps), None)
    taken, outcome = changed_in_worker(here.command_host, unit, desired, seen.inventory, intent, quiet=quiet)
    return replace(result, steps=(*result.steps, *taken), reasons=outcome.reasons)


def removed(
    here: Host, seen: HostObservation, gpu: PciAddress, vgpu: VgpuId, *, quiet: bool, dry_run: bool
) -> VgpuResult:
    """Remove one vGPU, and return the result, the expected one in a dry run; `seen` has the GPU's isolation unit."""
    if (managed := _managed(here, gpu)) is not None:
        return managed
    if dry_run:
        plan = byhand.removal(seen, gpu, vgpu)
        return VgpuResult(gpu, tuple(step.text for step in plan.steps), (*plan.refusals, *plan.pending), None)
    report, taken = step_reporter(quiet=quiet)
    unit, desired = seen.inventory.gpus[gpu].unit, {gpu: DesiredGpu(vgpus=DesiredVgpus())}

    def job() -> tuple[Reason, ...]:
        with beside(here.command_host, unit, desired, seen.inventory, f"remove the vGPU {vgpu}") as refusal:
            if refusal is not None:
                return (refusal,)
            return byhand.remove(here.change_host, gpu, vgpu, here.inputs, report, seen.inventory)

    found = in_worker(gpu, job, taken)
    return VgpuResult(gpu, tuple(taken), (found,) if isinstance(found, Reason) else found, None)


def _desired(desired: DesiredGpu) -> dict[str, int]:
    return dict(desired.vgpus.types) if desired.vgpus is not None else {}


def _managed(here: Host, gpu: PciAddress, desired_counts: dict[str, int] | None = None) -> VgpuResult | None:
    """Return the refusal to change a GPU whose vGPU config the agent keeps, None for other GPUs."""
    config = here.vgpu_configs.get(gpu)
    if config is None:
        return None
    return VgpuResult(gpu, (), (refusals.managed(gpu, config, is_config=True),), desired_counts)
