"""The host of a command, and its changes in a serial worker that the command can abandon while the kernel blocks it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import sleep  # noqa: TID251  a command waits for the kubelet
from typing import TypeVar

import msgspec
import typer

from gpuvirt.agent import published
from gpuvirt.agent.change.changehost import ChangeHost, Inputs, ReportStep, change_host_of
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, beside_agents, desires_of
from gpuvirt.agent.change.gate.gatelock import UnitBusyError, UnitUnsettledError, why_not_passed
from gpuvirt.agent.change.gate.gaterecord import APART_S
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.kubelet.hostaccount import ListUnknownError, read_lists
from gpuvirt.cli.parameters import options
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.clock import RealClock
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, parse_pci_address, with_domain
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError
from gpuvirt.model.allocation.allocateddevices import known_devices
from gpuvirt.model.change.desired import DesiredDriver, DesiredUnit
from gpuvirt.model.change.driverplanning import driver_of
from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId, slots_of
from gpuvirt.model.offers.view import GpuView, NodeView
from gpuvirt.model.reasons import Reason, ReasonCode, refusals
from gpuvirt.paths import HostRoots, KubeletPaths

T = TypeVar("T")

CHANGE_TIMEOUT_S = 180.0
"""sriov-manage takes some seconds for each GPU, and retries while a process has the GPU open. NVIDIA's driver may take
half a minute to release a GPU."""


class CommandHost(msgspec.Struct, frozen=True):
    """The host whose devices a command changes, and its agent's folder."""

    change_host: ChangeHost
    inputs: Inputs
    agent_folder: Path
    """The folder that the host's agent locks."""


def changed_in_worker(
    command_host: CommandHost, unit: UnitId, desired: DesiredUnit, seen: Inventory, intent: str | None, *, quiet: bool
) -> tuple[tuple[str, ...], Outcome]:
    """Change an isolation unit to its desired state; return the steps that were taken, and the outcome.

    `seen` is the host as it was last observed. `intent` is the first step, None if no step removes anything.
    """
    report, taken = step_reporter(quiet=quiet)
    change_host, inputs = command_host.change_host, command_host.inputs

    def job() -> Outcome:
        with beside(command_host, unit, desired, seen, intent) as refusal:
            if refusal is not None:
                return Outcome.everywhere(refusal, desired)
            return apply(change_host, unit, desired, inputs, Run(report, by_hand(unit, inputs.newest)), seen)

    found = in_worker(unit, job, taken)
    return tuple(taken), Outcome.everywhere(found, desired) if isinstance(found, Reason) else found


def beside(
    command_host: CommandHost, unit: UnitId, desired: DesiredUnit, seen: Inventory, intent: str | None
) -> AbstractContextManager[Reason | None]:
    """Ask the agent, if one runs, to drain the devices of a change; the context has the reason if it refuses."""
    if intent is None:
        return nullcontext()
    slots = slots_of(seen.facts.functions, seen.units.get(unit, ()))
    request = DrainRequest(unit, slots, intent, desires_of(desired))
    agents = Agents(command_host.agent_folder, lambda: _why_listed(command_host.change_host.device_plugins, unit, seen))
    return beside_agents(command_host.change_host.gates, agents, request)


def _why_listed(device_plugins: Path, unit: UnitId, seen: Inventory) -> Reason | None:
    """Return which socket lists a device of the unit, or does not say what it lists; None if no socket does."""
    known, members = known_devices(seen), seen.units.get(unit, ())
    try:
        lists = read_lists(device_plugins)
    except ListUnknownError as error:
        return refusals.agent_silent(unit, str(device_plugins), str(error))
    for socket, devices in lists.items():
        for device in sorted(devices):
            if device in known and known[device][0].gpu in members:
                return refusals.agent_silent(unit, str(socket), device)
    return None


def step_reporter(*, quiet: bool) -> tuple[ReportStep, list[str]]:
    """Return a callback for the steps of a change, which prints and records each step, and its list of steps."""
    taken: list[str] = []

    def report(step: Step | RollBack) -> None:
        taken.append(step.text)
        if not quiet:
            print(step.text, flush=True)

    return report, taken


def in_worker(subject: str, job: Callable[[], T], taken: Sequence[str]) -> T | Reason:
    """Return a job's result, or the reason for its failure; `taken` are the steps that it has begun.

    The kernel may block the last of these steps.
    """
    try:
        return asyncio.run(ThreadWorker(subject).run(lambda: _settled(job), name="change", timeout_s=CHANGE_TIMEOUT_S))
    except WorkerBlockedError:
        return refusals.blocked(subject, taken[-1] if taken else "the lease")
    except UnitBusyError as error:
        return why_not_passed(subject, error)


def _settled(job: Callable[[], T]) -> T:
    """Return a job's result; retry once if a second reading of the kubelet's accounts can settle the isolation unit."""
    try:
        return job()
    except UnitUnsettledError as error:
        if not error.again_soon:  # unknown: the job runs once more, and refuses itself
            raise
    sleep(APART_S)
    return job()


UNFIT = frozenset(
    {
        ReasonCode.BAR_UNASSIGNED,
        ReasonCode.BOOT_CONSOLE,
        ReasonCode.FELL_OFF_BUS,
        ReasonCode.GRACE_DRIVER_MISSING,
        ReasonCode.GROUP_NOT_VIABLE,
        ReasonCode.NODE_MISSING,
        ReasonCode.UNREAD,
    }
)
"""Reasons for which a GPU on a VFIO driver is of no use to any VM. A GPU that is in use, or that its last VM has left
its memory in, is bound for VMs all the same."""


class Host(msgspec.Struct, frozen=True):
    """The host whose devices a command lists or changes."""

    change_host: ChangeHost
    inputs: Inputs
    managed: Mapping[PciAddress, str]
    """The modes that the agent keeps GPUs in."""
    unfit: Mapping[PciAddress, tuple[Reason, ...]]
    """Why a VM could not use a GPU that is bound for VMs, as `gpuvirt devices` prints it."""
    vgpu_configs: Mapping[PciAddress, str | None]
    """The vGPU configs that the agent keeps applied; None for a GPU without one."""
    agent_folder: Path
    """The folder that this host's agent locks."""

    def why_kept(self, gpu: PciAddress, driver: DesiredDriver | None) -> Reason | None:
        """Return why a GPU does not get a driver: the agent keeps it in a mode that needs another one."""
        mode = self.managed.get(gpu)
        if mode is None or driver is None or driver_of(mode) is driver:
            return None
        return refusals.managed(gpu, mode)

    @property
    def command_host(self) -> CommandHost:
        """The host, for a change of its devices."""
        return CommandHost(self.change_host, self.inputs, self.agent_folder)


def account(roots: HostRoots, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> AllocationReader:
    """Return the reader of a host's allocations."""
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    ledgers = (roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return AllocationReader(RealKernel(roots), roots, kubelet, ledgers, assume_unallocated)


def host(
    account: AllocationReader, *, also: Iterable[str] = (), force: bool = False, require_reset: bool = True
) -> Host:
    """Return a host, with the modes and vGPU configs that its agent keeps."""
    change_host = change_host_of(account.kernel, account.roots, account.kubelet)
    view = _view(account.roots, account.kubelet, change_host)
    managed = {gpu.address: gpu.desired for gpu in view.gpus if gpu.desired is not None and view.agent is not None}
    unfit = {gpu.address: found for gpu in view.gpus if (found := _unfit(gpu))}
    vgpu_configs = {gpu.address: gpu.vgpu_config for gpu in view.gpus}
    names = snapshot.read_ledger(*account.ledgers).names
    allowed = frozenset(parsed(also))
    inputs = Inputs(account.account, names, allowed, force, require_reset, readings=account.readings)
    return Host(change_host, inputs, managed, unfit, vgpu_configs, account.roots.local(options.LEDGER).parent)


def _unfit(gpu: GpuView) -> tuple[Reason, ...]:
    unhealthy = gpu.healthy is False  # a GPU on its native driver has no health; no driver gives memory an address
    codes = UNFIT if unhealthy else {ReasonCode.BAR_UNASSIGNED}
    return tuple(reason for reason in gpu.reasons if reason.code in codes)


def _view(roots: HostRoots, kubelet: KubeletPaths, change_host: ChangeHost) -> NodeView:
    """Return the agent's view of the node, or a new one with the allocations of the agent's ledger."""
    clock = RealClock()
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = published.read_view(
        roots.run / published.VIEW_FILE, clock.monotonic_s(), snapshot.boot_id(change_host.kernel), procs
    )
    if view is not None:
        return view
    ledger = snapshot.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return snapshot.take(change_host.kernel, Settings(), options.read_pci_ids(None, roots), clock, ledger)


def parsed(texts: Iterable[str]) -> Iterable[PciAddress]:
    """Yield PCI addresses, with domain 0000 where it is not given; raise BadParameter for an invalid text."""
    for text in texts:
        try:
            yield parse_pci_address(with_domain(text))
        except InvalidIdError as error:
            raise typer.BadParameter(str(error)) from error
