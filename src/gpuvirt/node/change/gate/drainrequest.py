"""What a command asks of the agent before it changes devices: to take them off what the kubelet may give to pods.

The command writes its intent into the gates of the unit's slots. From then on Allocate refuses the devices. The agent
stops offering them, waits until the kubelet no longer counts those that no pod has, and acknowledges the generation; or
it refuses, since it keeps the unit in another desired state. Without an agent the command keeps one from starting.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredUnit
from gpuvirt.model.inventory.isolation import Slots, UnitId
from gpuvirt.model.reasons import Reason, refusals
from gpuvirt.node.change.gate.gate import Gate
from gpuvirt.node.change.gate.gatelock import tries, try_lock
from gpuvirt.node.change.gate.gaterecord import GateRecord

ANSWER_S = 10.0
"""How long the agent's answer is waited for."""
ASK_AGAIN_S = 0.05
VGPUS = "vgpus"
"""What a command desires of a GPU besides its driver."""

Desires = Mapping[PciAddress, Sequence[str]]
"""What a command desires of GPUs: a driver, or other vGPUs."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """What a command is about to do."""

    unit: UnitId
    slots: Slots
    intent: str
    desires: Desires


def desires_of(desired: DesiredUnit) -> Desires:
    """Return what an agent has to agree with."""
    return {
        gpu: (*([str(one.driver)] if one.driver is not None else ()), *([VGPUS] if one.vgpus is not None else ()))
        for gpu, one in desired.items()
    }


@contextmanager
def beside_agent(gate: Gate, agent_folder: Path, request: DrainRequest) -> Iterator[Reason | None]:
    """Have devices drained for as long as the context lasts; it gives why that can't be, None where they are.

    `agent_folder` is the one that an agent locks. Raises UnitBusyError.
    """
    with ExitStack() as stack:
        if stack.enter_context(no_agent(agent_folder)):
            yield None
            return
        with drained(gate, request) as refusal:
            yield refusal


@contextmanager
def no_agent(folder: Path) -> Iterator[bool]:
    """Return whether no agent runs; none starts then for as long as the context lasts. Other commands may."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextmanager
def drained(gate: Gate, request: DrainRequest) -> Iterator[Reason | None]:
    """Have devices drained by the agent that runs; the context gives why it does not, None where it has."""
    desires = {str(gpu): tuple(desired) for gpu, desired in request.desires.items()}
    gate.drain(request.unit, request.slots, request.intent, desires=desires)
    try:
        yield _answer(gate, request)
    finally:
        gate.stop_draining(request.slots)


def _answer(gate: Gate, request: DrainRequest) -> Reason | None:
    """Wait for the agent; return why it does not drain."""
    silent: list[str] = []
    for _ in tries(ANSWER_S, ASK_AGAIN_S):
        records = {slot: gate.read(slot) for slot in request.slots}
        known = [one for one in records.values() if isinstance(one, GateRecord)]
        if (refused := next((one.reason for one in known if one.reason is not None), None)) is not None:
            return refused
        silent = [slot for slot, one in records.items() if not isinstance(one, GateRecord) or not one.is_acknowledged]
        if not silent:
            return None
    return refusals.agent_silent(request.unit, ANSWER_S, str(gate.path_of(silent[0], "json")))
