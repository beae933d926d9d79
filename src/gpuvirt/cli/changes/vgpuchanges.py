"""The work of `gpuvirt vgpu` apply, assert, create and delete, on its host or in a dry run."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import typer
from msgspec.structs import replace

from gpuvirt.agent.change import unitchange
from gpuvirt.agent.change.observation import HostObservation, observe
from gpuvirt.cli.changes import commandhost
from gpuvirt.cli.changes.commandhost import Host, beside, changed_in_worker, in_worker, step_reporter
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import changesrender
from gpuvirt.cli.output.changesrender import VgpuResult
from gpuvirt.cli.parameters import vgpuconfigs
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciAddress, VgpuId, with_domain
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import host_of_vfs
from gpuvirt.model.change.desired import DesiredDriver, DesiredGpu, DesiredVgpus
from gpuvirt.model.change.planner import plan_unit
from gpuvirt.model.change.vgpus.desiredvgpus import config_gpus, desired_vgpus_of
from gpuvirt.model.change.vgpus.gpustate import GpuState
from gpuvirt.model.change.vgpus.vgpuplanning import lacks_vfs, no_host, unknown_after_bind
from gpuvirt.model.desired.configchoice import desired
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, Note, NoteCode
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.model.vgputypes.profiles import resolve_type
from gpuvirt.paths import HostRoots

NO_CONFIG = "no config is for a GPU of this host (gpuvirt vgpu types)"


def vgpu_host(host_root: Path, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> Host:
    """Return the host of a command, with the reader of its allocations."""
    account = commandhost.account(HostRoots.under(host_root), kubelet_dir, assume_unallocated=assume_unallocated)
    return commandhost.host(account)


def gpu_states(seen: HostObservation) -> Mapping[PciAddress, GpuState]:
    """Return the states of the GPUs that can carry vGPUs now."""
    found = {gpu: seen.gpu_state(gpu) for gpu in sorted(seen.inventory.gpus)}
    return {gpu: state for gpu, state in found.items() if state is not None}


def no_vgpu_hosts(seen: HostObservation, gpus: Iterable[PciAddress]) -> Iterator[Reason]:
    """Yield why GPUs can't carry vGPUs now; a GPU that can has no reason."""
    for gpu in gpus:
        if seen.gpu_state(gpu) is None:
            reason, off = no_host(seen.inventory.facts, gpu), lacks_vfs(seen.inventory.facts.functions[gpu])
            has_manager = seen.inventory.facts.platform.vgpu_manager is True  # unknown: `no_host` says it
            yield next(unitchange.why_no_vfs(seen.change_host, gpu) if off and has_manager else iter(()), reason)


def gpus_named(seen: HostObservation, addresses: Iterable[str]) -> list[PciAddress]:
    """Return the GPUs that addresses name; raise BadParameter for an address that is no GPU."""
    found = list(commandhost.parsed(addresses))
    for address in found:
        if address not in seen.inventory.gpus:
            raise typer.BadParameter(f"{address} is no GPU of this host (gpuvirt devices)")
    return found


def would(seen: HostObservation, gpu: PciAddress, desired: DesiredGpu, *, opens: bool = False) -> VgpuResult:
    """Return the expected result of a change of a GPU; `opens`: also try whether a process has its vGPUs open."""
    unit = {gpu: desired}
    if opens:
        plan = plan_unit(seen.unit_state(unit), seen.inventory.gpus[gpu].unit, unit)
        seen = unitchange.with_unseen_users(seen, plan.vgpus_of(gpu))
    state = seen.unit_state(unit)
    plan = plan_unit(state, seen.inventory.gpus[gpu].unit, unit)
    steps = (*(step.text for step in plan.steps), *plan.later)
    against = unitchange.hindrances(seen, state, plan)[gpu]
    unknown = unknown_after_bind(seen.inventory.facts, gpu) if plan.vgpus_of(gpu).follows else None
    after = (*plan.drivers.left_driverless, *((unknown,) if unknown is not None else ()))
    return VgpuResult(gpu, steps, (*plan.reasons, *against, *after), _counts(desired))


def changed(here: Host, seen: HostObservation, gpu: PciAddress, desired: DesiredGpu, *, quiet: bool) -> VgpuResult:
    """Change a GPU to its desired state, and return the result; `seen` has the GPU's isolation unit."""
    unit = seen.inventory.gpus[gpu].unit
    plan = plan_unit(seen.unit_state({gpu: desired}), unit, {gpu: desired})
    takes_away = bool(plan.drivers.steps) or any(phase.destroys for phase in plan.vgpus)
    intent = next((step.text for step in plan.steps), None) if takes_away else None
    taken, outcome = changed_in_worker(here.command_host, unit, {gpu: desired}, seen.inventory, intent, quiet=quiet)
    return VgpuResult(gpu, taken, outcome.reasons, _counts(desired))


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
    held = unitchange.with_unseen_users(seen, unitchange.plan_vgpu_removal(seen, gpu, vgpu))
    if dry_run or held is not seen:
        plan = unitchange.plan_vgpu_removal(held, gpu, vgpu)
        return VgpuResult(gpu, tuple(step.text for step in plan.steps), (*plan.refusals, *plan.pending), None)
    report, taken = step_reporter(quiet=quiet)
    unit, desired = seen.inventory.gpus[gpu].unit, {gpu: DesiredGpu(vgpus=DesiredVgpus())}

    def job() -> tuple[Reason, ...]:
        with beside(here.command_host, unit, desired, seen.inventory, f"remove the vGPU {vgpu}") as refusal:
            if refusal is not None:
                return (refusal,)
            return unitchange.remove_vgpu(here.change_host, gpu, vgpu, here.inputs, report, seen.inventory)

    found = in_worker(gpu, job, taken)
    return VgpuResult(gpu, tuple(taken), (found,) if isinstance(found, Reason) else found, None)


def _counts(desired: DesiredGpu) -> dict[str, int]:
    return dict(desired.vgpus.types) if desired.vgpus is not None else {}


def _managed(here: Host, gpu: PciAddress, desired: DesiredGpu | None = None) -> VgpuResult | None:
    """Return the refusal to change a GPU that the agent keeps otherwise, None for other GPUs."""
    config = here.vgpu_configs.get(gpu)
    counts, driver = (_counts(desired), desired.driver) if desired is not None else (None, None)
    kept = here.why_kept(gpu, driver) if config is None else refusals.managed(gpu, config, is_config=True)
    return None if kept is None else VgpuResult(gpu, (), (kept,), counts)


class AppliedHost(msgspec.Struct, frozen=True):
    """The host of a command, and its output format."""

    host_root: Path
    kubelet_dir: Path | None
    output: Output
    assume_unallocated: bool = False

    @property
    def quiet(self) -> bool:
        """Whether the output is a document, beside which no progress is printed."""
        return self.output is not Output.TABLE


def apply(where: AppliedHost, config_file: str | None, selected: str | None, *, rebind: bool, dry_run: bool) -> None:
    """Apply a vGPU config to its GPUs; exit with 1 if a GPU does not carry its vGPUs afterwards.

    A GPU whose card has none of the types is one of these; the other GPUs are changed.

    With `rebind`, a GPU on a VFIO driver is first bound to its original driver.
    """
    configs, notes = vgpuconfigs.read_configs(config_file)
    entries = _selected(where, configs, selected)
    here, seen = _seen(where)
    driver = DesiredDriver.NATIVE if rebind else None
    found = _desired(seen, entries, notes)
    desired = {gpu: DesiredGpu(driver, vgpus) for gpu, vgpus in found.vgpus.items()}
    _change(where, here, seen, desired, dry_run=dry_run, unfit=found.unfit)


def check(where: AppliedHost, config_file: str | None, selected: str | None, *, valid_only: bool) -> None:
    """Check whether GPUs carry the vGPUs of a vGPU config; exit with 1 if one does not."""
    configs, notes = vgpuconfigs.read_configs(config_file)
    if valid_only:
        vgpuconfigs.select(configs, selected)
        _print_notes(notes)
        return
    entries = _selected(where, configs, selected)
    _, seen = _seen(where)
    found = _desired(seen, entries, notes)
    results = [would(seen, gpu, DesiredGpu(vgpus=desired_vgpus)) for gpu, desired_vgpus in found.vgpus.items()]
    changesrender.vgpu_results(results, output=where.output, dry_run=True, unfit=bool(found.unfit))
    if found.unfit or any(result.steps or result.reasons for result in results):
        raise typer.Exit(1)


def create(where: AppliedHost, address: str, vgpu_type: str, count: int, *, dry_run: bool) -> None:
    """Create vGPUs on a GPU, in addition to its existing ones; exit with 1 if that fails.

    VFs that split the GPU are also bound for VMs: on their native driver no VM can use them.
    """
    here, seen = _seen(where)
    (gpu,) = gpus_named(seen, [address])
    gpu_state = seen.gpu_state(gpu)
    vgpus = gpu_state.host.live if gpu_state is not None else ()
    desired_counts = Counter[str](vgpu.type for vgpu in vgpus if not isinstance(vgpu.type, Unread))
    name = resolve_type(vgpu_type, gpu_state.known_types) if gpu_state is not None else None
    desired_counts[name or vgpu_type] += count
    _change(where, here, seen, {gpu: DesiredGpu(vgpus=DesiredVgpus(desired_counts, added=count))}, dry_run=dry_run)


def delete(where: AppliedHost, ids: Sequence[str], *, dry_run: bool) -> None:
    """Remove unused vGPUs; exit with 1 if one stays."""
    here, seen = _seen(where)
    gpus = {vgpu.id: gpu for gpu, gpu_state in gpu_states(seen).items() for vgpu in gpu_state.host.live}
    chosen = [VgpuId(text) for text in dict.fromkeys(with_domain(text).lower() for text in ids)]
    if missing := [vgpu for vgpu in chosen if vgpu not in gpus]:
        raise typer.BadParameter(f"{missing[0]}: this host has no such vGPU (gpuvirt vgpu list)")
    results = [
        removed(here, seen, gpus[vgpu], vgpu, quiet=where.quiet, dry_run=dry_run)
        for vgpu in sorted(chosen, key=lambda vgpu: (gpus[vgpu], vgpu))
    ]
    changesrender.vgpu_results(results, output=where.output, dry_run=dry_run)
    if any(result.reasons for result in results):
        raise typer.Exit(1)


def _seen(where: AppliedHost) -> tuple[Host, HostObservation]:
    here = vgpu_host(where.host_root, where.kubelet_dir, assume_unallocated=where.assume_unallocated)
    seen = observe(here.change_host, here.inputs, None)
    return replace(here, inputs=seen.inputs), seen


def _selected(
    where: AppliedHost, configs: Mapping[str, tuple[ConfigEntry, ...]], name: str | None
) -> tuple[ConfigEntry, ...]:
    """Return the selected config; raise ConfigError with those for this host if none is selected."""
    if name is not None or len(configs) == 1:
        return configs[vgpuconfigs.select(configs, name)]
    _, seen = _seen(where)
    gpus = config_gpus(seen.inventory, gpu_states(seen))
    fitting = [name for name, entries in configs.items() if desired(entries, gpus).gpus]
    found = f"the configs for the GPUs of this host are {', '.join(fitting)}" if fitting else NO_CONFIG
    raise ConfigError(f"is missing; {found}", where="--selected-config")


class _Applied(msgspec.Struct, frozen=True):
    """A vGPU config as it applies to the GPUs of a host."""

    vgpus: Mapping[PciAddress, DesiredVgpus]
    unfit: tuple[Note, ...]
    """Why GPUs that the config selects do not get its types: their cards have none of these."""


def _desired(seen: HostObservation, entries: tuple[ConfigEntry, ...], notes: Iterable[Note]) -> _Applied:
    """Return the desired vGPUs of each GPU of a config, and print the notes on the config."""
    found = desired(entries, config_gpus(seen.inventory, gpu_states(seen)))
    unfit = tuple(note for note in found.notes if note.code is NoteCode.OTHER_CARD)
    _print_notes((*notes, *(note for note in found.notes if note not in unfit)))
    for note in unfit:
        typer.echo(f"gpuvirt: {ReasonCode.CONFIG_INVALID}: {note.text} (gpuvirt vgpu types)", err=True)
    return _Applied({gpu: desired_vgpus_of(vgpus) for gpu, vgpus in found.gpus.items()}, unfit)


def _change(
    where: AppliedHost,
    here: Host,
    seen: HostObservation,
    desired: Mapping[PciAddress, DesiredGpu],
    *,
    dry_run: bool,
    unfit: Sequence[Note] = (),
) -> None:
    results: list[VgpuResult] = []
    for gpu, desired_gpu in sorted(desired.items()):
        expected = would(seen, gpu, desired_gpu, opens=dry_run)
        result = expected
        if expected.steps or expected.reasons:
            refused = _managed(here, gpu, desired_gpu)
            result = refused or (expected if dry_run else changed(here, seen, gpu, desired_gpu, quiet=where.quiet))
        if result.steps and not result.reasons and host_of_vfs(seen.inventory.facts.functions[gpu]) is not None:
            result = with_vfs_bound(here, result, quiet=where.quiet, dry_run=dry_run)
        results.append(result)
    changesrender.vgpu_results(results, output=where.output, dry_run=dry_run, unfit=bool(unfit))
    if unfit or any(result.reasons for result in results):
        raise typer.Exit(1)


def _print_notes(notes: Iterable[Note]) -> None:
    for note in notes:
        typer.echo(f"gpuvirt: {note.text}", err=True)
