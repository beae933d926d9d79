"""One connection to a hypervisor: it starts the child, tells it of the lease, and ends it when it hangs or is idle.

What can fail between a connection and its hypervisor is worded here, since the child imports no reasons. Schedules with
the same hypervisor and account share one connection, and its child: a child takes some 25 MiB and a session at the
hypervisor, and each reading is of all VMs. A hundred schedules of one vCenter may switch at once.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpuvirt.clock import Clock, Timer
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons.schedules import hypervisor_problem
from gpuvirt.model.workers.connection import DEAD_AFTER_S, HypervisorCredentials, HypervisorKind, MayCallUntil
from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Ability,
    Accepted,
    Call,
    Hypervisor,
    OutcomeUnknown,
    Refused,
    VmKey,
    VmsReading,
    VmsUnknown,
)
from gpuvirt.model.workers.hypervisor import Answer as CallAnswer
from gpuvirt_schedules.hypervisors.childprocess import ChildProcess
from gpuvirt_schedules.hypervisors.messages import (
    MOST_CALLS,
    MOST_CHECKS,
    Answer,
    Checked,
    CheckVms,
    Failed,
    Make,
    Problem,
    Read,
    Request,
    Start,
    Vms,
)
from gpuvirt_schedules.sharedreading import SharedReading


class FairQueue:
    """Some places, for requests of several owners. It belongs to one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}
        """The requests that wait, by owner; the owner whose turn is next comes first."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    async def take(self, owner: object) -> None:
        """Wait for a place, which is the caller's until `leave`."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                turns = self._waiting[owner]
                turns.remove(turn)
                if not turns:
                    del self._waiting[owner]
            raise

    def leave(self) -> None:
        """Give a place to the next request that waits."""
        if not self._waiting:
            self._free += 1
            return
        owner = next(iter(self._waiting))
        turns = self._waiting.pop(owner)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[owner] = turns


CODES: Mapping[Problem, ReasonCode] = {
    Problem.UNREACHABLE: ReasonCode.HYPERVISOR_UNREACHABLE,
    Problem.NOT_TRUSTED: ReasonCode.HYPERVISOR_NOT_TRUSTED,
    Problem.WRONG_CREDENTIALS: ReasonCode.WRONG_CREDENTIALS,
    Problem.SESSION_LOST: ReasonCode.HYPERVISOR_SESSION_LOST,
    Problem.FORBIDDEN: ReasonCode.HYPERVISOR_FORBIDDEN,
    Problem.INCOMPLETE: ReasonCode.HYPERVISOR_ANSWER_INCOMPLETE,
    Problem.REFUSED: ReasonCode.HYPERVISOR_REFUSED,
    Problem.FAILED: ReasonCode.HYPERVISOR_CALL_FAILED,
    Problem.NO_CAPACITY: ReasonCode.NO_GRAPHICS_CAPACITY,
    Problem.WRONG_POWER: ReasonCode.WRONG_POWER_STATE,
    Problem.VM_MISSING: ReasonCode.VM_NOT_FOUND,
    Problem.TOOLS_MISSING: ReasonCode.GUEST_TOOLS_MISSING,
    Problem.NO_SUSPEND: ReasonCode.SUSPEND_NOT_SUPPORTED,
    Problem.TYPE_MISSING: ReasonCode.VGPU_TYPE_NOT_OFFERED,
    Problem.NOT_ONE_VGPU: ReasonCode.NOT_ONE_VGPU,
    Problem.NOT_INSTALLED: ReasonCode.BACK_END_MISSING,
    Problem.SILENT: ReasonCode.HYPERVISOR_SILENT,
    Problem.ENDED: ReasonCode.HYPERVISOR_CONNECTION_ENDED,
    Problem.LEASE_LOST: ReasonCode.LEASE_LOST,
}
REQUEST_S = 30.0
"""How long the child may take for a request. One that has not answered a call is killed then, with all that is under
way. One that has not answered a reading or a check gets no more requests, and ends once its calls are answered."""
TURN_S = 25.0
"""How long a call or a check waits for others to end. It is certainly not made then. With `REQUEST_S` it is less than
schedules wait for an answer."""
RENEW_S = 1.0
"""How often the child is told of a renewal of the lease, which a leader makes every 2 s."""
REFUSED_S = 60.0
"""How long wrong credentials are not tried again. A vCenter locks a user after five failures within three minutes."""
IDLE_S = 60.0
"""How long a child without requests is kept: some 30 MiB, and a session at the hypervisor."""


def reason(problem: Problem, server: str, words: str) -> Reason:
    """Return the reason for a problem with a hypervisor."""
    return hypervisor_problem(CODES[problem], server, words)


def worded(abilities: Abilities, server: str) -> Abilities:
    """Return a child's abilities with codes and texts of the catalogue."""
    return replace(
        abilities,
        suspend=_worded(abilities.suspend, server),
        shut_down=_worded(abilities.shut_down, server),
        start=_worded(abilities.start, server),
        set_vgpu_type=_worded(abilities.set_vgpu_type, server),
    )


def _worded(ability: Ability, server: str) -> Ability:
    if not ability.code:
        return ability
    found = reason(Problem(ability.code), server, ability.text)
    return Ability(ability.is_possible, found.code, found.text)


log = logging.getLogger(__name__)


class ChildHypervisor:
    """A hypervisor behind a child process, which starts with a request, and again with the next one after its end."""

    def __init__(
        self,
        start: Start,
        clock: Clock,
        may_call_until_s: MayCallUntil,
        *,
        request_s: float = REQUEST_S,
    ) -> None:
        self._start = start
        self._clock = clock
        self._may_call_until_s = may_call_until_s
        self._request_s = request_s
        self._numbers = itertools.count(1)
        self._starting = asyncio.Lock()
        self._queues: Mapping[type[Request], FairQueue] = {
            Make: FairQueue(MOST_CALLS),
            CheckVms: FairQueue(MOST_CHECKS),
        }
        self._readings = SharedReading(self._read)
        self._child: ChildProcess | None = None
        self._retired: set[ChildProcess] = set()
        """The children that get no more requests, and have calls to answer."""
        self._idle: ChildProcess | None = None
        """The last child that was killed for want of requests, which may still be ending."""
        self._used_s = 0.0
        self._refused: tuple[float, Answer] | None = None
        """When the hypervisor has refused the credentials, and its answer."""
        self._timer: Timer | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's process, None while there is none."""
        return self._child.pid if self._child is not None else None

    async def read(self) -> VmsReading:
        """Return all VMs that the hypervisor shows to this user, by a reading that is not older than this request."""
        return await self._readings.read()

    async def _read(self) -> VmsReading:
        answer = await self._asked(Read)
        vms = answer.vms if isinstance(answer, Vms) else None
        return self._unknown(answer) if vms is None else {vm.key: vm for vm in vms}

    async def call(self, call: Call, owner: object = None) -> CallAnswer:
        """Make one call. The caller holds the lease at this moment. Calls of several owners are made in turn."""
        answer = await self._ask(lambda number: Make(number, call), owner)
        if not isinstance(answer, Failed):
            return Accepted()
        found = reason(answer.problem, self._start.server, answer.text)
        kind = Refused if answer.is_certain else OutcomeUnknown
        return kind(found.code, found.text)

    async def check(self, vms: Iterable[VmKey], owner: object = None) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return the possible actions on each of these VMs; changes nothing. VMs that do not exist are missing."""
        keys = tuple(vms)
        answer = await self._asked(lambda number: CheckVms(number, keys), owner)
        if isinstance(answer, Checked):
            return {found.vm: worded(found, self._start.server) for found in answer.abilities}
        return self._unknown(answer)

    async def close(self) -> None:
        """Kill the child. Its connections are reset, so that what the hypervisor has not received never arrives."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        children = [child for child in (self._child, self._idle, *self._retired) if child is not None]
        self._child, self._idle = None, None
        self._retired.clear()
        for child in children:
            await _killed(child)

    def _unknown(self, answer: Answer) -> VmsUnknown:
        problem, text = (answer.problem, answer.text) if isinstance(answer, Failed) else (Problem.INCOMPLETE, "")
        found = reason(problem, self._start.server, text)
        return VmsUnknown(found.code, found.text)

    async def _asked(self, request: Callable[[int], Request], owner: object = None) -> Answer:
        """Return the answer to a request that changes nothing: it is repeated if its child has ended."""
        answer = await self._ask(request, owner)
        if isinstance(answer, Failed) and answer.problem is Problem.ENDED:
            answer = await self._ask(request, owner)
        return answer

    async def _ask(self, request: Callable[[int], Request], owner: object) -> Answer:
        """Return the child's answer, or what keeps it from answering, once it is the owner's turn."""
        made = request(next(self._numbers))
        queue = self._queues.get(type(made))
        if queue is None:
            return await self._answer(made)
        try:
            async with asyncio.timeout(TURN_S):
                await queue.take(owner)
        except TimeoutError:
            text = f"it was not asked: {queue.waiting + 1} requests wait since {TURN_S:g} s, or less"
            return Failed(made.id, Problem.SILENT, text, True)
        try:
            return await self._answer(made)
        finally:
            queue.leave()

    async def _answer(self, request: Request) -> Answer:
        """Return the child's answer, or what keeps it from answering."""
        number = request.id
        if not self._may_ask():
            return Failed(number, Problem.LEASE_LOST, "", True)
        if self._refused is not None and self._clock.monotonic_s() - self._refused[0] < REFUSED_S:
            return self._refused[1]
        try:
            child = await self._running()
        except OSError as error:
            return Failed(number, Problem.ENDED, f"it could not be started: {error.strerror}", True)
        if not self._may_ask():  # starting a process takes a moment, in which this connection may have been closed
            await self._drop(child)
            return Failed(number, Problem.LEASE_LOST, "", True)
        child.renew(self._may_call_until_s())
        self._used_s = self._clock.monotonic_s()
        answer = await self._answer_of(child, request)
        if not isinstance(answer, Failed):
            self._refused = None
        elif answer.problem is Problem.WRONG_CREDENTIALS:
            self._refused = (self._clock.monotonic_s(), answer)
            await self._drop(child)  # it would refuse for ever
        elif isinstance(request, Make) and not answer.is_certain:
            await self._drop(child, "the outcome of another call is unknown")  # so that it comes to nothing later
        return answer

    async def _answer_of(self, child: ChildProcess, request: Request) -> Answer:
        """Return a child's answer; end a child that gives none in time."""
        text = f"no answer within {self._request_s:g} s"
        answer: Answer | None = Failed(request.id, Problem.SILENT, text, False)
        try:
            async with asyncio.timeout(self._request_s):
                answer = await child.ask(request)
        except TimeoutError:
            log.warning("the hypervisor did not answer in time", extra={"server": self._start.server})
            if isinstance(request, Make):
                await self._drop(child, f"{text} to another call")
            else:
                self._forget(child)  # it may hang, and gets no more requests; its calls may still be answered
                if not child.is_gone:
                    self._retired.add(child)
        except asyncio.CancelledError:
            if isinstance(request, Make):
                self._forget(child)
                child.kill("another call was given up")
            raise
        if answer is None or (child in self._retired and not child.is_calling):
            await self._drop(child)
        return answer if answer is not None else Failed(request.id, Problem.ENDED, child.ended_for, False)

    def _may_ask(self) -> bool:
        return not self._is_closed and self._clock.monotonic_s() < self._may_call_until_s()

    async def _running(self) -> ChildProcess:
        """Return the child, and start it where there is none; raises OSError."""
        async with self._starting:
            if self._child is None or self._child.is_gone:
                self._child = await ChildProcess.start()
                self._child.renew(self._may_call_until_s())
                self._child.send(self._start)
                self._wait()
            return self._child

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(RENEW_S, self._tick)

    def _tick(self) -> None:
        if self._is_closed:
            return
        child = self._child
        if child is not None and child.is_idle and self._clock.monotonic_s() - self._used_s > IDLE_S:
            self._child, self._idle = None, child
            child.kill()
        living = [found for found in (self._child, *self._retired) if found is not None and not found.is_gone]
        for found in living:
            found.renew(self._may_call_until_s())
        if living:
            self._wait()

    def _forget(self, child: ChildProcess) -> None:
        if self._child is child:
            self._child = None
        self._retired.discard(child)

    async def _drop(self, child: ChildProcess, why: str = "") -> None:
        self._forget(child)
        await _killed(child, why)


async def _killed(child: ChildProcess, why: str = "") -> None:
    child.kill(why)
    try:
        async with asyncio.timeout(DEAD_AFTER_S):
            await child.ended()
    except TimeoutError:
        log.warning("a child that was killed has not ended: the kernel blocks it", extra={"pid": child.pid})


def start_order(kind: HypervisorKind, given: HypervisorCredentials) -> Start:
    """Return the first order of a child."""
    return Start(kind, given.server, given.ca, given.user, given.password, given.certificate, given.key)


async def open_hypervisor(
    kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
) -> Hypervisor:
    """Return a connection, whose child starts with the first request. Never raises: errors are answers."""
    return ChildHypervisor(start_order(kind, credentials), clock, may_call_until_s)


class _Shared(msgspec.Struct):
    connection: ChildHypervisor
    users: int = 0


class SharedHypervisors:
    """The connections of one term as the leader, by hypervisor and credentials. The last user of one closes it."""

    def __init__(self) -> None:
        self._opened: dict[Start, _Shared] = {}

    async def open(
        self, kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
    ) -> Hypervisor:
        """Return a connection, as `connection.open_hypervisor` does. Another password is another connection."""
        start = start_order(kind, credentials)
        shared = self._opened.setdefault(start, _Shared(ChildHypervisor(start, clock, may_call_until_s)))
        shared.users += 1
        return _User(self, start, shared.connection)

    async def release(self, start: Start) -> None:
        """Close a connection that nobody uses any more."""
        shared = self._opened[start]
        shared.users -= 1
        if not shared.users:
            del self._opened[start]
            await shared.connection.close()


class _User:
    """One schedule's use of a connection."""

    def __init__(self, owner: SharedHypervisors, start: Start, connection: ChildHypervisor) -> None:
        self._owner, self._start, self._connection = owner, start, connection
        self._is_closed = False

    async def read(self) -> VmsReading:
        """Return all VMs that the hypervisor shows to this user."""
        return await self._connection.read()

    async def call(self, call: Call) -> CallAnswer:
        """Make one call."""
        return await self._connection.call(call, self)

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return the possible actions on each of these VMs."""
        return await self._connection.check(vms, self)

    async def close(self) -> None:
        """End this use; the child ends with the last one."""
        if not self._is_closed:
            self._is_closed = True
            await self._owner.release(self._start)
