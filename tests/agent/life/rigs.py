"""Two ways to run an agent's life: its conclusions alone, and the whole agent in virtual time."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.allocation.allocator import Allocator, Callbacks
from gpuvirt.agent.change.allocationgate import AllocationGate
from gpuvirt.agent.change.gate.drainrequest import NoGate
from gpuvirt.agent.known.kubeletrecord import KubeletRecord
from gpuvirt.agent.known.requests import AllocationRequest
from gpuvirt.agent.known.state import NodeState
from gpuvirt.agent.loops.telemetry import Telemetry
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.store import agentstate
from gpuvirt.errors import DamagedError
from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.scan import scan, with_users
from gpuvirt.model.allocation.attachment import Attachment
from gpuvirt.model.allocation.ledger import Consumer, KubeletAccount, Ledger, SettledAt
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.clock import BEGINNING, SimClock
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import IDS, at_once
from tests.inlineworker import InlineWorker

Consumers = Mapping[tuple[ResourceName, DeviceId], Consumer]

WHO = AgentView(version="test", pid=1, started=BEGINNING, plugin_only=False)


def spec_of(resources: Iterable[ResourceName]) -> GpuNodeSpec:
    withheld = (Withheld(resource, "ForeignProvider", "is offered by KubeVirt itself") for resource in resources)
    return GpuNodeSpec("unmanaged", withheld=tuple(withheld))


class Rig(Protocol):
    """An agent that the rules drive."""

    kernel: SimKernel

    @property
    def view(self) -> NodeView: ...

    def look(self) -> None:
        """Let enough time pass for the agent to scan everything."""
        ...

    def pass_time(self, seconds: float) -> None: ...

    def report_account(self, held: Consumers | None) -> None: ...

    def withhold(self, resources: Iterable[ResourceName]) -> None:
        """Let the cluster withhold these resources, and no others."""
        ...

    def allocate(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Attachment: ...

    def prefer(self, resource: ResourceName, available: Sequence[DeviceId], size: int) -> Sequence[DeviceId]: ...

    def kill(self, torn: int | None) -> None:
        """Kill the agent and start it again; `torn` cuts its ledger file to so many bytes."""
        ...

    def end(self) -> None: ...


def account_at(clock: SimClock, held: Consumers) -> KubeletAccount:
    """Return the account of this moment by a kubelet that records each answer at once."""
    return KubeletAccount(clock.now(), clock.monotonic_s(), held, settled_s=SettledAt(clock.monotonic_s()))


def options_of(kernel: SimKernel, clock: SimClock, ledger: Path) -> NodeOptions:
    return NodeOptions(
        kernel=kernel,
        clock=clock,
        kubelet=KubeletPaths(Path("/nonexistent")),
        terms=NodeTerms(Settings(), IDS, review=ReviewTerms()),
        workers=lambda _: InlineWorker(),
        ledger=ledger,
        gates=ledger.with_name("locks") if ledger.name else Path("/nonexistent"),
        state_file=None,
        desired_state=ledger.with_name("desired.json") if ledger.name else None,
    )


class Conclusions:
    """The agent's state and conclusions without tasks or time: thousands of steps a second."""

    def __init__(self, kernel: SimKernel) -> None:
        self.kernel = kernel
        self._now = SimClock()
        self._stored = agentstate.LEDGER.encode(Ledger())
        self._facts: Facts | None = None
        self._spec: GpuNodeSpec | None = None
        self._start(Ledger())

    def _start(self, ledger: Ledger) -> None:
        self._state = NodeState(NodeTerms(Settings(), IDS, WHO), ledger)
        self._state.observe_request(NodeRequest(spec=Observed(self._spec)))
        callbacks = Callbacks(lambda: None, lambda: None, lambda _: None)
        none = NoGate(Reason(ReasonCode.GATE_FAILED, "the agent", "has no files"))
        gate = AllocationGate(self._state.changes, lambda: none)
        self._allocator = Allocator(
            self._state, options_of(self.kernel, self._now, Path()), KubeletRecord(dict), Telemetry(), callbacks, gate
        )
        self._facts = None
        self.look()

    @property
    def view(self) -> NodeView:
        return self._view

    def look(self) -> None:
        self._facts = with_users(self.kernel, scan(self.kernel, self._facts))
        self._state.observe_facts(self._facts)
        self._conclude()

    def _conclude(self) -> None:
        self._view = self._state.decide(self._now.monotonic_s(), self._now.now())
        self._stored = agentstate.LEDGER.encode(self._state.ledger.content)

    def pass_time(self, seconds: float) -> None:
        self._now._now_s += seconds

    def report_account(self, held: Consumers | None) -> None:
        self._state.observe_account(None if held is None else account_at(self._now, held))
        self._conclude()

    def withhold(self, resources: Iterable[ResourceName]) -> None:
        self._spec = spec_of(resources)
        self._state.observe_request(NodeRequest(spec=Observed(self._spec)))
        self._conclude()

    def allocate(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Attachment:
        (answer,) = at_once(self._allocator.allocate(AllocationRequest(resource, [devices])))
        self._conclude()
        return answer

    def prefer(self, resource: ResourceName, available: Sequence[DeviceId], size: int) -> Sequence[DeviceId]:
        return self._allocator.prefer(resource, available, [], size)

    def kill(self, torn: int | None) -> None:
        try:
            ledger, _ = agentstate.LEDGER.decode(self._stored[:torn])
        except DamagedError:
            ledger = Ledger()
        self._start(ledger)

    def end(self) -> None:
        return


class WholeAgent:
    """The agent with its tasks, in virtual time."""

    def __init__(self, kernel: SimKernel, folder: Path) -> None:
        self.kernel = kernel
        self._ledger = folder / "ledger.json"
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._clock = SimClock()
        self._start()

    def _start(self) -> None:
        options = options_of(self.kernel, self._clock, self._ledger)
        self._agent = Agent(options, KubeletRecord(dict), WHO)
        self._task = self._loop.create_task(self._agent.run())
        self._runner.run(self._clock.settle())

    @property
    def view(self) -> NodeView:
        return self._agent.views.get()

    def look(self) -> None:
        self._runner.run(self._clock.advance(11))

    def pass_time(self, seconds: float) -> None:
        self._runner.run(self._clock.advance(seconds))

    def report_account(self, held: Consumers | None) -> None:
        self._agent.observations.observe_account(None if held is None else account_at(self._clock, held))
        self._runner.run(self._clock.settle())

    def withhold(self, resources: Iterable[ResourceName]) -> None:
        self._agent.observations.take_request(NodeRequest(spec=Observed(spec_of(resources))))
        self._runner.run(self._clock.settle())

    def allocate(self, resource: ResourceName, devices: Sequence[DeviceId]) -> Attachment:
        (answer,) = at_once(self._agent.allocators.existing.allocate(AllocationRequest(resource, [devices])))
        self._runner.run(self._clock.settle())
        return answer

    def prefer(self, resource: ResourceName, available: Sequence[DeviceId], size: int) -> Sequence[DeviceId]:
        return self._agent.allocators.existing.prefer(resource, available, [], size)

    def kill(self, torn: int | None) -> None:
        stored = self._ledger.read_bytes() if self._ledger.exists() else b""
        self._stop()
        self._ledger.write_bytes(stored[:torn])  # a crash loses the last writes
        self._start()

    def _stop(self) -> None:
        self._task.cancel()
        self._runner.run(asyncio.wait([self._task]))

    def end(self) -> None:
        self._stop()
        self._runner.close()
