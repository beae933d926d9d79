"""The agents of a world: each is a process with its own event loop, started and killed by the schedule."""

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from gpuvirt.agent.agent import Agent
from gpuvirt.agent.change.changehost import ChangeHost as CommandHost
from gpuvirt.agent.change.gate.agentlock import only_agent
from gpuvirt.agent.change.gate.gate import gate_at, plugin_gates
from gpuvirt.agent.change.gate.gaterecord import GateOwner
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.known.kubeletrecord import KubeletRecord
from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.recordedallocations import RecordedAllocations
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.store.agentstate import history_store
from gpuvirt.errors import AlreadyRunningError
from gpuvirt.facts.ids import NodeName
from gpuvirt.facts.nodes import unread_node
from gpuvirt.facts.pci import Unread
from gpuvirt.hardware.usage.processes import NAMESPACE
from gpuvirt.model.allocation.allocations import Recorded, Unknown
from gpuvirt.model.node.desirednode import RequestTerms
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.model.offers.namereview import ReviewTerms
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.tasks import keep_going
from gpuvirt_sim.clock import BEGINNING
from tests.agent.node.simnode import IDS
from tests.explore.jobs import ExploredWorker
from tests.explore.loop import ExploredLoop
from tests.explore.observer import ViolationError
from tests.explore.scenario import Program
from tests.explore.scheduler import Process
from tests.explore.seam import ExploredKernel, ExploredTools
from tests.explore.sharing import Sharing, open_shares, run_shares, sharing_of
from tests.explore.unprivileged import UnprivilegedKernel

if TYPE_CHECKING:
    from tests.explore.world import World


@dataclass(eq=False)
class Running:
    """One run of the agent."""

    process: Process
    loop: ExploredLoop
    agent: Agent
    sharing: Sharing | None
    observed: int = -1
    """The number of the desired state that the agent has observed."""
    mode: str | None = None
    """The desired state of that number."""
    mode_at: int = 0
    """The rests of its event loop when it observed that; at the next rest it has computed its conclusions."""
    main_task: asyncio.Task[None] | None = None

    def ask(self, request: Callable[[], Coroutine[None, None, None]], fail: Callable[[], None]) -> None:
        """Let a request reach the agent; `fail` it where the agent was killed."""
        if self.process.dead:
            fail()
        else:
            self._asking = self.loop.create_task(request())


class Agents:
    """The agents of one world, and the gates of each process."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.running: Running | None = None
        """The agent that was started last."""
        self.older: Running | None = None
        """The older of two running agents."""
        self.serving: Running | None = None
        """The agent whose devices the kubelet lists, and whose Allocate it calls."""
        self._starts = 0
        self._dead: list[Process] = []
        self._owners: dict[Process, GateOwner] = {}
        """The owners of all processes so far, as the gates record them."""
        self._gates: dict[Process, tuple[Path, Path]] = {}
        """The two folders of the gates, by the paths of each process."""
        self._loops: list[ExploredLoop] = []
        self._locked: dict[Process, list[int]] = {}
        """The folders that running agents have locked."""

    @property
    def all(self) -> Iterator[Running]:
        """Yield the agents that run."""
        return (agent for agent in (self.running, self.older) if agent is not None)

    @property
    def are_dying(self) -> bool:
        """Whether a strand of a killed agent still runs, such as a write that the kernel blocks."""
        return any(self._world.scheduler.has_strands(process) for process in self._dead)

    @property
    def view(self) -> NodeView | None:
        """The view of the agent that was started last, None if no agent runs."""
        return self.running.agent.views.get() if self.running is not None else None

    def owner(self, process: Process) -> GateOwner:
        """Return the owner that the gates record for a process."""
        return self._owners.setdefault(process, GateOwner(len(self._owners) + 1, 0))

    def seen_by(self, process: Process) -> tuple[ExploredKernel, ExploredTools]:
        """Return the kernel and the programs of a process."""
        world, is_agent = self._world, process.name.startswith("agent")
        kind = UnprivilegedKernel if is_agent and world.scenario.program.is_unprivileged else ExploredKernel
        kernel = kind(lambda: world.kernel, world.scheduler, process, world.observer, whole=world.scenario.whole)
        return kernel, ExploredTools(lambda: self._world.tools, self._world.scheduler, process, self._world.observer)

    def host_of(self, process: Process) -> CommandHost:
        """Return the host that a process changes."""
        kernel, tools = self.seen_by(process)
        gates, device_plugins = self._gates_of(process)
        return CommandHost(kernel, tools, self._world.disk.folder / "state/drivers.json", gates, device_plugins)

    def _gates_of(self, process: Process) -> tuple[Path, Path]:
        """Return the folders of the gates by paths of this process only, so that processes share no state in memory."""
        found: list[Path] = []
        for folder in (self._world.disk.volatile / "units", self._world.kubelet.paths.device_plugins):
            own = folder.with_name(f"{folder.name} of process {self.owner(process).pid}")
            folder.mkdir(exist_ok=True)
            own.symlink_to(folder)
            found.append(own)
        self._gates[process] = (found[0], plugin_gates(found[1]))
        return found[0], found[1]

    def start_beside(self) -> None:
        """Start a second agent beside the running agent: the kubelet calls it as soon as it has listed its devices.

        It has its own ledger. If both had the same folder, the lock on the folder would let only one of them run.
        """
        self.older = self.running
        self.start(ledger="state/ledger of another.json")

    def start(self, ledger: str = "state/ledger.json") -> None:
        """Start the agent as a new process."""
        world = self._world
        self._starts += 1
        process = Process(f"agent {self._starts}")
        loop = ExploredLoop(world.scheduler, process, world.clock, reorders=world.scenario.whole)
        self._loops.append(loop)
        host = self.host_of(process)

        def worker(name: str) -> ExploredWorker:
            return ExploredWorker(name, world.scheduler, process, loop, ends=world.scenario.job_ends)

        history = history_store(world.disk.folder / ledger, worker("record history"), world.clock)
        history.load()
        boot_id = snapshot.boot_id(world.kernel)
        recorded = RecordedAllocations(world.kubelet.paths, unread_node, history.value, boot_id, history.save)
        world.kubelet.before_start = recorded.read
        program = world.scenario.program
        self._lock_folders(process)

        def read_recorded() -> Recorded | Unknown:
            world.observer.read_account()
            return recorded.read()

        options = NodeOptions(
            kernel=host.kernel,
            clock=world.clock,
            intervals=world.scenario.intervals,
            workers=worker,
            kubelet=world.kubelet.paths,
            terms=NodeTerms(
                world.scenario.settings,
                IDS,
                review=ReviewTerms(),
                vgpus_only=program is Program.VGPUS_ONLY,
                request=RequestTerms(in_cluster=True, follows_spec=program is not Program.VGPUS_ONLY),
            ),
            ledger=world.disk.folder / ledger,
            gates=self._gates_of_agent(process, program),
            state_file=None,
            desired_state=(world.disk.folder / ledger).with_name(f"desired.json beside {Path(ledger).name}"),
            node_name=NodeName("node01"),
            change_host=host if not program.is_unprivileged else None,
            plugin_only=program.is_unprivileged,
        )
        agent_view = AgentView(version="test", pid=1, started=BEGINNING, plugin_only=False)
        shares = open_shares(world, Path(ledger).name, worker) if world.scenario.shares else None
        agent = Agent(options, KubeletRecord(read_recorded, recorded.lost), agent_view, shares)
        if agent.preparing is not None:
            agent.preparing.read = world.claims.read
        sharing = sharing_of(world, agent, host.kernel, worker("shares"))
        kubelets = world.kubelet.pids
        account = AccountWatch(
            world.kubelet.paths,
            recorded,
            kubelets if not program.is_unprivileged else lambda: Unread(NAMESPACE),
            world.clock,
            world.scenario.intervals,
            world.resend,
            lacks_api=program.is_unprivileged,
        )

        async def live() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(agent.run())
                group.create_task(history.run(lambda problem: agent.reports.problem("record history", problem)))
                group.create_task(keep_going("holders", lambda: account.run(agent.observations), world.clock))
                if sharing is not None:
                    group.create_task(run_shares(world, sharing))

        main_task = loop.create_task(live())
        main_task.add_done_callback(partial(self._fail_unless_killed, process))
        self.running = Running(process, loop, agent, sharing, main_task=main_task)

    def _fail_unless_killed(self, process: Process, main_task: asyncio.Task[None]) -> None:
        """End the schedule with a failure where an agent has ended itself."""
        if process.dead or main_task.cancelled():
            return
        error = main_task.exception() or ViolationError("crash", f"{process.name} has ended")
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            (error,) = error.exceptions
        self._world.scheduler.fail(error)

    def end(self) -> None:
        """Kill the agent, or the newer of two agents."""
        if (running := self.running) is not None:
            self.running = self.older
            self.older = None
            self._end(running)

    def end_older(self) -> None:
        """Kill the older of two agents."""
        if (older := self.older) is not None:
            self.older = None
            self._end(older)

    @property
    def can_start(self) -> bool:
        """Whether no command has the folders that an agent locks."""
        try:
            with ExitStack() as stack:
                for folder in self._folders:
                    folder.mkdir(exist_ok=True)
                    stack.enter_context(only_agent(folder))
        except AlreadyRunningError:
            return False
        return True

    @property
    def folder(self) -> Path:
        """The folder that an agent locks, unless it has no access to it."""
        return self._world.disk.folder / "state of the agent"

    @property
    def _folders(self) -> tuple[Path, ...]:
        device_plugins, program = self._world.kubelet.paths.device_plugins, self._world.scenario.program
        if program is Program.VGPUS_ONLY:
            return (self.folder,)
        return (device_plugins,) if program.is_unprivileged else (self.folder, device_plugins)

    def _lock_folders(self, process: Process) -> None:
        """Lock the folders of an agent. The second of two agents has folders of its own, which no command knows."""
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) if self.older is None else None
            self._locked.setdefault(process, []).append(fd)

    def _gates_of_agent(self, process: Process, program: Program) -> Path:
        """Return the folder of the gates of an agent's allocations."""
        host, plugin = self._gates[process]
        return Path("/proc/gates") if program is Program.WITHOUT_GATES else plugin if program.is_unprivileged else host

    def files_of_agent(self, number: int, *, gates: bool) -> tuple[Path, ...]:
        """Return the files of the running agent that fail: its gates, or its ledger and journal."""
        if self.running is None or not gates:
            return (self._world.disk.folder / "state",)
        if number == errno.EMFILE:
            return self._gates[self.running.process]
        return self._world.disk.volatile / "units", plugin_gates(self._world.kubelet.paths.device_plugins)

    def _end(self, running: Running) -> None:
        self._dead.append(running.process)
        self._world.scheduler.kill(running.process)
        running.agent._gates._membership.leave()
        for fd in self._locked.pop(running.process):
            os.close(fd)
        for gates in self._gates[running.process]:
            close_drains(gates)
        if self.serving in {running, None}:
            self.serving = None
            self._world.kubelet.lose_plugins()

    def close(self) -> None:
        """Close the event loops, and the files by which processes drained slots."""
        for loop in self._loops:
            loop.close()
        for agent in self.all:
            agent.agent._gates._membership.leave()
        for fd in chain.from_iterable(self._locked.values()):
            os.close(fd)
        for gates in chain.from_iterable(self._gates.values()):
            close_drains(gates)


def close_drains(gates: Path) -> None:
    """Close the files by which a process that has ended drained slots, as the kernel does."""
    draining = gate_at(gates).draining
    while draining:
        os.close(draining.popitem()[1])
