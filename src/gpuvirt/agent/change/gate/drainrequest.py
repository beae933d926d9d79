"""The request of a command that the agent drains devices before the command changes them.

The command writes its intent into the gates of the unit's slots. From then on Allocate refuses the devices. The agent
stops offering them, waits until the kubelet no longer counts the free ones, and acknowledges the generation. The agent
refuses instead if it keeps the unit in another desired state. Without a running agent, the command keeps agents from
starting. An unprivileged device plugin is asked in the same way, in the gates of its own folder. One that has no gates
can't be asked: the command refuses what its sockets list.

An agent that runs has the lock on the file `agent` in the folder. A device plugin without that lock (an older one, or
one that may not write there) can't be asked, so commands go by what its sockets list.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from gpuvirt.agent.change.gate.agentlock import no_agent, no_plugin
from gpuvirt.agent.change.gate.gate import PATIENCE_S, Gate, Gates
from gpuvirt.agent.change.gate.gatelock import GateFailedError, is_current, open_file, tries, try_lock
from gpuvirt.agent.change.gate.gaterecord import GateRecord
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import VGPUS, DesiredUnit
from gpuvirt.model.inventory.isolation import Slots, UnitId
from gpuvirt.model.reasons import Reason, refusals

AGENT = "agent"
"""The name of the file that the agent of a folder has locked."""


class NoGate(msgspec.Struct, frozen=True):
    """The part of an agent that allocates without a gate, and of which every command knows that."""

    why: Reason
    """Why the agent has no gate."""


class Membership(msgspec.Struct):
    """One agent's part in the gates of a folder."""

    own: Gate
    may_lack: bool = False
    """Whether the agent allocates although it can't take part, as a drop-in for a plugin that has no gates does."""
    _lock: int | None = None
    _problem: GateFailedError | None = msgspec.field(default=None)

    @property
    def gate(self) -> Gate | NoGate:
        """The gate that each allocation of the agent passes."""
        if self._lock is None and self.may_lack and self._problem is not None:
            return NoGate(self._reason(self._problem))
        return self.own

    @property
    def problem(self) -> Reason | None:
        """Why the agent does not take part, None if it does."""
        return self._reason(self._problem) if self._problem is not None else None

    def join(self) -> None:
        """Take part from now on; try again where that failed, and where the file was deleted."""
        path = self.own.folder / AGENT
        try:
            if self._lock is not None and is_current(self._lock, path):
                return
            self.leave()
            lock = open_file(path)
            try:
                if try_lock(lock, fcntl.LOCK_EX, PATIENCE_S):  # a command tries the lock for a moment
                    self._lock, lock = lock, -1
            finally:
                if lock >= 0:
                    os.close(lock)
            self._problem = None
        except GateFailedError as error:
            self._problem = error

    def leave(self) -> None:
        """Take no part any more."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _reason(self, error: GateFailedError) -> Reason:
        if self.may_lack:
            return refusals.gate_failed("the device plugin", error.path, error.problem, is_plugins=True)
        return refusals.gate_failed("the agent", error.path, error.problem)


def has_member(gate: Gate) -> bool:
    """Return whether an agent takes part in the gates of a folder; raise GateFailedError."""
    path = gate.folder / AGENT
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False  # unknown: nothing, no agent takes part
    except OSError as error:
        raise GateFailedError(path, error) from error
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


ANSWER_S = 10.0
"""How long a command waits for the agent's answer."""
ASK_AGAIN_S = 0.05

Desires = Mapping[PciAddress, Sequence[str]]
"""The changes of a command, by GPU: the name of the desired driver, `VGPUS`, or both."""


class DrainRequest(msgspec.Struct, frozen=True):
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


class Agents(msgspec.Struct, frozen=True):
    """The agents of a host, as a command finds them."""

    folder: Path
    """The folder that each agent but a plugin without access to it locks."""
    why_listed: Callable[[], Reason | None]
    """Reads the lists of the device plugins' live sockets; returns which one still lists a device of the change."""


@contextmanager
def beside_agents(gates: Gates, agents: Agents, request: DrainRequest) -> Iterator[Reason | None]:
    """Keep devices drained while the context lasts; the context value is the reason for a refusal, None if drained.

    No agent can start meanwhile where none runs. Raises UnitBusyError.
    """
    with ExitStack() as stack:
        asked: list[Gate] = []
        if not stack.enter_context(no_agent(agents.folder)):
            asked.append(gates.host)
        offers = gates.may_have_plugins and not stack.enter_context(no_plugin(gates.device_plugins))
        drained = (gates.host, gates.plugin) if offers else asked
        for gate in drained:
            stack.enter_context(draining(gate, request))
        members = [gate for gate in drained if has_member(gate)]
        for gate in (*asked, *(gate for gate in members if gate not in asked)):
            if (refusal := _answer(gate, request)) is not None:
                yield refusal
                return
        yield _why_listed(agents) if offers and not members else None


def _why_listed(agents: Agents) -> Reason | None:
    """Return why a device plugin that can't be asked could still allocate the devices."""
    return agents.why_listed()


@contextmanager
def draining(gate: Gate, request: DrainRequest) -> Iterator[None]:
    """Write the intent of a command into a gate's records while the context lasts; raise UnitBusyError."""
    desires = {str(gpu): tuple(desired) for gpu, desired in request.desires.items()}
    gate.drain(request.unit, request.slots, request.intent, desires=desires)
    try:
        yield
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
    path = str(gate.path_of(unanswered[0], "json"))
    return refusals.agent_silent(request.unit, path, "Draining, not acknowledged", ANSWER_S)
