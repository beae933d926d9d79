"""Calls to a hypervisor are made with the lease, and a connection whose call may be under way is closed."""

from gpuvirt.model.workers.connection import DEAD_AFTER_S
from gpuvirt.model.workers.hypervisor import (
    Accepted,
    Action,
    Call,
    Hypervisor,
    OutcomeUnknown,
    VmKey,
    VmProof,
    VmsUnknown,
)
from gpuvirt_schedules.controller.vmcalls import VmCalls
from gpuvirt_sim.clock import SimClock
from tests.schedules.modelhypervisor import Connection, Fault, ModelHypervisor, Vm

KEY = VmKey("key")
CALL = Call(VmProof(KEY), Action.START)


class Setup:
    """A hypervisor with one VM, and the calls to it."""

    def __init__(self) -> None:
        self.clock = SimClock()
        vm = Vm(KEY, "worker-1", "", 4)
        self.hypervisor = ModelHypervisor({KEY: vm}, self.clock.monotonic_s, lambda call, sender: None, _fail)
        self.fault = Fault.NONE
        self.leads = True
        self.opened: list[Connection] = []
        self.is_known = True
        self.calls = VmCalls(self._connect, self.clock, lambda: self.leads, 0.0)

    async def _connect(self) -> Hypervisor | VmsUnknown:
        if not self.is_known:
            return VmsUnknown("HypervisorUnknown", "the Secret lacks a password")
        self.opened.append(Connection(self.hypervisor, lambda: True, self._before))
        return self.opened[-1]

    async def _before(self, what: str) -> Fault:
        return self.fault if what.startswith("call") else Fault.NONE


def _fail(what: str) -> None:
    raise AssertionError(what)


async def test_no_call_is_made_without_the_lease() -> None:
    setup = Setup()
    setup.leads = False
    assert await setup.calls.call(CALL) is None
    assert not setup.calls.latest
    setup.leads = True
    assert await setup.calls.call(CALL) == Accepted()
    assert setup.calls.latest[KEY].action is Action.START


async def test_a_connection_is_closed_after_an_unknown_outcome() -> None:
    setup = Setup()
    setup.fault = Fault.LATE
    assert isinstance(await setup.calls.call(CALL), OutcomeUnknown)
    assert setup.opened[0].dead_at_s is not None
    setup.fault = Fault.NONE
    assert isinstance(await setup.calls.read(), dict)
    assert len(setup.opened) == 2


async def test_what_a_connection_lacks_is_unknown() -> None:
    setup = Setup()
    setup.is_known = False
    assert await setup.calls.read() == VmsUnknown("HypervisorUnknown", "the Secret lacks a password")
    assert await setup.calls.call(CALL) is None


async def test_the_first_round_waits_for_the_connections_of_an_older_leader() -> None:
    assert Setup().calls.alone_in_s == DEAD_AFTER_S
