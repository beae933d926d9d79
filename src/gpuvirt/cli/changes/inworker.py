"""Changes of a host by a command, in a serial worker that the command can abandon while the kernel blocks it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import sleep  # noqa: TID251  a command waits for the kubelet
from typing import TypeVar

import msgspec

from gpuvirt.agent.change.changehost import ChangeHost, ReportStep
from gpuvirt.agent.change.gate.drainrequest import Agents, DrainRequest, beside_agents, desires_of
from gpuvirt.agent.change.gate.gateerrors import UnitBusyError, UnitUnsettledError, why_not_passed
from gpuvirt.agent.change.gate.gaterecord import APART_S
from gpuvirt.agent.change.inputs import Inputs
from gpuvirt.agent.change.steps.changes import by_hand
from gpuvirt.agent.change.steps.vgpusteps import Run
from gpuvirt.agent.change.unitchange import apply
from gpuvirt.agent.kubelet.livelists import ListUnknownError, read_lists
from gpuvirt.loops.serialworker import ThreadWorker, WorkerBlockedError
from gpuvirt.model.allocation.knowndevices import known_devices
from gpuvirt.model.change.desired import DesiredUnit
from gpuvirt.model.change.outcome import Outcome
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory.inventory import Inventory
from gpuvirt.model.inventory.isolation import UnitId, slots_of
from gpuvirt.model.reasons import Reason, refusals

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
