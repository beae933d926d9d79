"""The request of a command that the agent drains devices before the command changes them.

The command writes its intent into the gates of the unit's slots. From then on Allocate refuses the devices. The agent
stops offering them, waits until the kubelet no longer counts the free ones, and acknowledges the generation. The agent
refuses instead if it keeps the unit in another desired state. Without a running agent, the command keeps agents from
starting.
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
"""How long a command waits for the agent's answer."""
ASK_AGAIN_S = 0.05
VGPUS = "vgpus"
"""Stands in `Desires` for other vGPUs on a GPU."""

Desires = Mapping[PciAddress, Sequence[str]]
"""What a command changes, by GPU: the name of the desired driver, `VGPUS`, or both."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """The change that a command is about to make."""

    unit: UnitId
    slots: Slots
    intent: str
    desires: Desires


def desires_of(desired: DesiredUnit) -> Desires:
    """Return the desires that a running agent has to agree with."""
    return {
        gpu: (
            *([str(target.driver)] if target.driver is not None else ()),
            *([VGPUS] if target.vgpus is not None else ()),
        )
        for gpu, target in desired.items()
    }


@contextmanager
def beside_agent(gate: Gate, agent_folder: Path, request: DrainRequest) -> Iterator[Reason | None]:
    """Keep devices drained while the context lasts; the context value is the reason for a refusal, None if drained.

    `agent_folder` is the folder that an agent locks. Raises UnitBusyError.
    """
    with ExitStack() as stack:
        if stack.enter_context(no_agent(agent_folder)):
            yield None
            return
        with drained(gate, request) as refusal:
            yield refusal


@contextmanager
def no_agent(folder: Path) -> Iterator[bool]:
    """Return whether no agent runs. If so, no agent can start while the context lasts; other commands can."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


@contextmanager
def drained(gate: Gate, request: DrainRequest) -> Iterator[Reason | None]:
    """Ask the running agent to drain devices; the context value is the reason for its refusal, None if drained."""
    desires = {str(gpu): tuple(desired) for gpu, desired in request.desires.items()}
    gate.drain(request.unit, request.slots, request.intent, desires=desires)
    try:
        yield _answer(gate, request)
    finally:
        gate.stop_draining(request.slots)


def _answer(gate: Gate, request: DrainRequest) -> Reason | None:
    """Wait for the agent's answer; return the reason for its refusal."""
    unanswered: list[str] = []
    for _ in tries(ANSWER_S, ASK_AGAIN_S):
        found = {slot: gate.read(slot) for slot in request.slots}
        records = {slot: record for slot, record in found.items() if isinstance(record, GateRecord)}
        if (refused := next((record.reason for record in records.values() if record.reason), None)) is not None:
            return refused
        unanswered = [slot for slot in request.slots if slot not in records or not records[slot].is_acknowledged]
        if not unanswered:
            return None
    return refusals.agent_silent(request.unit, ANSWER_S, str(gate.path_of(unanswered[0], "json")))
