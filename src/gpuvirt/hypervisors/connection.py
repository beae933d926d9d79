"""One connection to a hypervisor: it starts the child, tells it of the lease, and ends it when it hangs or is idle.

`open_hypervisor` opens it; `apps` injects that function into the controller. What can fail between a connection and its
hypervisor is worded here, since the child imports no reasons.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from gpuvirt.clock import Clock, Timer
from gpuvirt.hypervisors.childprocess import ChildProcess
from gpuvirt.hypervisors.messages import (
    Answer,
    Checked,
    CheckVms,
    Failed,
    Make,
    Problem,
    Read,
    Renew,
    Request,
    Start,
    Vms,
)
from gpuvirt.model.reasons import Reason, hypervisorproblems
from gpuvirt.model.schedules.connection import DEAD_AFTER_S, HypervisorCredentials, HypervisorKind, MayCallUntil
from gpuvirt.model.schedules.hypervisor import (
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
from gpuvirt.model.schedules.hypervisor import Answer as CallAnswer

WORDINGS: Mapping[Problem, Callable[[str, str], Reason]] = {
    Problem.UNREACHABLE: hypervisorproblems.unreachable,
    Problem.NOT_TRUSTED: hypervisorproblems.not_trusted,
    Problem.WRONG_CREDENTIALS: hypervisorproblems.wrong_credentials,
    Problem.SESSION_LOST: hypervisorproblems.session_lost,
    Problem.FORBIDDEN: hypervisorproblems.forbidden,
    Problem.INCOMPLETE: hypervisorproblems.answer_incomplete,
    Problem.REFUSED: hypervisorproblems.refused,
    Problem.FAILED: hypervisorproblems.call_failed,
    Problem.NO_CAPACITY: hypervisorproblems.no_graphics_capacity,
    Problem.WRONG_POWER: hypervisorproblems.wrong_power_state,
    Problem.VM_MISSING: hypervisorproblems.vm_not_found,
    Problem.TOOLS_MISSING: hypervisorproblems.guest_tools_missing,
    Problem.NO_SUSPEND: hypervisorproblems.suspend_not_supported,
    Problem.TYPE_MISSING: hypervisorproblems.vgpu_type_not_offered,
    Problem.NOT_ONE_VGPU: hypervisorproblems.not_one_vgpu,
    Problem.NOT_INSTALLED: hypervisorproblems.back_end_missing,
    Problem.SILENT: hypervisorproblems.silent,
    Problem.ENDED: hypervisorproblems.connection_ended,
    Problem.LEASE_LOST: lambda server, _: hypervisorproblems.lease_lost(server),
}
REQUEST_S = 30.0
"""How long the child may take for a request. It is killed then, with all that is under way."""
RENEW_S = 1.0
"""How often the child is told of a renewal of the lease, which a leader makes every 2 s."""
REFUSED_S = 60.0
"""How long wrong credentials are not tried again. A vCenter locks a user after five failures within three minutes."""
IDLE_S = 60.0
"""How long a child without requests is kept: some 30 MiB, and a session at the hypervisor."""


def reason(problem: Problem, server: str, words: str) -> Reason:
    """Return the reason for a problem with a hypervisor."""
    return WORDINGS[problem](server, words)


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
        self._child: ChildProcess | None = None
        self._idle: ChildProcess | None = None
        """The last child that was killed for want of requests, which may still be ending."""
        self._sent_until_s = -math.inf
        """The end of the lease that the child knows."""
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
        """Return all VMs that the hypervisor shows to this user."""
        answer = await self._ask(Read)
        if isinstance(answer, Vms):
            return {vm.key: vm for vm in answer.vms}
        return self._unknown(answer)

    async def call(self, call: Call) -> CallAnswer:
        """Make one call. The caller holds the lease at this moment."""
        answer = await self._ask(lambda number: Make(number, call))
        if not isinstance(answer, Failed):
            return Accepted()
        found = reason(answer.problem, self._start.server, answer.text)
        kind = Refused if answer.is_certain else OutcomeUnknown
        return kind(found.code, found.text)

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return the possible actions on each of these VMs; changes nothing. VMs that do not exist are missing."""
        keys = tuple(vms)
        answer = await self._ask(lambda number: CheckVms(number, keys))
        if isinstance(answer, Checked):
            return {found.vm: worded(found, self._start.server) for found in answer.abilities}
        return self._unknown(answer)

    async def close(self) -> None:
        """Kill the child. Its connections are reset, so that what the hypervisor has not received never arrives."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        children, self._child, self._idle = (self._child, self._idle), None, None
        for child in children:
            if child is not None:
                await _killed(child)

    def _unknown(self, answer: Answer) -> VmsUnknown:
        problem, text = (answer.problem, answer.text) if isinstance(answer, Failed) else (Problem.INCOMPLETE, "")
        found = reason(problem, self._start.server, text)
        return VmsUnknown(found.code, found.text)

    async def _ask(self, request: Callable[[int], Request]) -> Answer:
        """Return the child's answer, or what keeps it from answering."""
        number = next(self._numbers)
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
        self._renew(child)
        self._used_s = self._clock.monotonic_s()
        answer = await self._answer_of(child, request(number))
        if not isinstance(answer, Failed):
            self._refused = None
        elif answer.problem is Problem.WRONG_CREDENTIALS:
            self._refused = (self._clock.monotonic_s(), answer)
            await self._drop(child)  # it would refuse for ever
        return answer

    async def _answer_of(self, child: ChildProcess, request: Request) -> Answer:
        """Return a child's answer; kill a child that gives none in time."""
        try:
            async with asyncio.timeout(self._request_s):
                answer = await child.ask(request)
        except TimeoutError:
            log.warning("the hypervisor did not answer in time", extra={"server": self._start.server})
            await self._drop(child)
            return Failed(request.id, Problem.SILENT, f"no answer within {self._request_s:g} s", False)
        if answer is None:
            await self._drop(child)
            return Failed(request.id, Problem.ENDED, "", False)
        return answer

    def _may_ask(self) -> bool:
        return not self._is_closed and self._clock.monotonic_s() < self._may_call_until_s()

    async def _running(self) -> ChildProcess:
        """Return the child, and start it where there is none; raises OSError."""
        async with self._starting:
            if self._child is None or self._child.is_gone:
                self._child = await ChildProcess.start()
                self._sent_until_s = -math.inf
                self._renew(self._child)
                self._child.send(self._start)
                self._wait()
            return self._child

    def _renew(self, child: ChildProcess) -> None:
        until_s = self._may_call_until_s()
        if until_s > self._sent_until_s:  # a lease that is lost has an earlier end: the child keeps to the one it knows
            self._sent_until_s = until_s
            child.send(Renew(until_s if math.isfinite(until_s) else None))

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(RENEW_S, self._tick)

    def _tick(self) -> None:
        child = self._child
        if child is None or child.is_gone or self._is_closed:
            return
        if child.is_idle and self._clock.monotonic_s() - self._used_s > IDLE_S:
            self._child, self._idle = None, child
            child.kill()
            return
        self._renew(child)
        self._wait()

    async def _drop(self, child: ChildProcess) -> None:
        if self._child is child:
            self._child = None
        await _killed(child)


async def _killed(child: ChildProcess) -> None:
    child.kill()
    try:
        async with asyncio.timeout(DEAD_AFTER_S):
            await child.ended()
    except TimeoutError:
        log.warning("a child that was killed has not ended: the kernel blocks it", extra={"pid": child.pid})


def start_order(kind: HypervisorKind, credentials: HypervisorCredentials) -> Start:
    """Return the first order of a child."""
    given = credentials
    return Start(kind, given.server, given.ca, given.user, given.password, given.certificate, given.key)


async def open_hypervisor(
    kind: HypervisorKind, credentials: HypervisorCredentials, clock: Clock, may_call_until_s: MayCallUntil
) -> Hypervisor:
    """Return a connection, whose child starts with the first request. Never raises: errors are answers."""
    return ChildHypervisor(start_order(kind, credentials), clock, may_call_until_s)
