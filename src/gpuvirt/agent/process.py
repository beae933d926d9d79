"""The process of the agent, from start to SIGTERM: its locks, the agent itself, its device plugins and probes."""

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from gpuvirt import __version__
from gpuvirt.agent import metrics
from gpuvirt.agent.agent import Agent
from gpuvirt.agent.change.gate.agentlock import only_agent
from gpuvirt.agent.known import nokubelet, snapshot
from gpuvirt.agent.known.kubeletrecord import KubeletRecord, PodInquiry
from gpuvirt.agent.kubelet.accountwatch import AccountWatch
from gpuvirt.agent.kubelet.claimdriver import ClaimDriver
from gpuvirt.agent.kubelet.plugins import Plugins
from gpuvirt.agent.kubelet.recordedallocations import PodFolder, RecordedAllocations
from gpuvirt.agent.kubelet.units import RecordedUnits, UnitOffer
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.options import NodeOptions
from gpuvirt.agent.shares import limitfiles, sharefiles
from gpuvirt.agent.shares.limitfiles import DriverLimits, LimitFiles, MpsLimits
from gpuvirt.agent.shares.memoryuse import DriverReader, MemoryFollower, find_program, read_uses
from gpuvirt.agent.shares.nodeshares import NodeShares, stored_shares
from gpuvirt.agent.shares.shareallocator import Accounts, Dependencies
from gpuvirt.agent.shares.sharefiles import SpecFiles
from gpuvirt.agent.store.agentstate import history_store
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.mps import FOLDER, PIPES
from gpuvirt.facts.nodes import unread_node
from gpuvirt.hardware.usage.nativeusers import read_node
from gpuvirt.hardware.usage.podprocesses import read_running_pods
from gpuvirt.hardware.usage.processes import has_usual_root, read_kubelets
from gpuvirt.loops.cell import Cell
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.offers.view import AgentView, NodeView
from gpuvirt.model.reasons import Reason, Seen, nodeproblems
from gpuvirt.model.shares.node.driverlimit import PROGRAM
from gpuvirt.tasks import keep_going, until_stopped
from gpuvirt.web.exposition import CONTENT_TYPE, PageAnswer

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
READY = b"READY=1"
FOLDER_CHECK_S = 1.0
SETTLED_AFTER_S = 5.0


ClusterTask = Callable[[Agent, Clock], Awaitable[None]]
"""The agent's client of the API server; an agent without one does not load that code."""


async def run_until_stopped(options: NodeOptions, cluster: ClusterTask | None = None) -> None:
    """Run the agent until SIGTERM or SIGINT; it returns after it has removed its sockets and written the ledger."""
    await until_stopped(run(options, cluster))


async def run(
    options: NodeOptions, cluster: ClusterTask | None = None, *, started: Callable[[Agent], None] | None = None
) -> None:
    """Run the agent until it is cancelled; raise AlreadyRunningError if the node has another agent.

    `started` is called with the new agent.
    """
    find_kubelet = partial(nokubelet.prove, options.kernel)
    if not options.labels_only:
        found = find_kubelet(options.kubelet, lambda: read_kubelets(options.kernel))
        if isinstance(found, nokubelet.KubeletTrace):
            await _wait_for(options.kubelet.device_plugins, options.clock, found.seen)
    with _only_agent(options):
        store = history_store(options.ledger, options.workers("record history"), options.clock)
        store.load()
        boot_id = snapshot.boot_id(options.kernel)
        # Without privileges the agent's `/dev` is not that of the host.
        read = unread_node if options.plugin_only else partial(read_node, options.kernel)
        recorded = RecordedAllocations(options.kubelet, read, store.value, boot_id, store.save, find_kubelet)
        shares = _shares(options, options.cdi_folder) if options.cdi_folder and not options.terms.vgpus_only else None
        agent = Agent(options, _record(options, recorded), _who_we_are(options), shares)
        if started is not None:
            started(agent)
        async with asyncio.TaskGroup() as group:
            group.create_task(_settle_memory(options.clock))
            group.create_task(agent.run())
            if not options.labels_only:
                group.create_task(store.run(lambda problem: agent.reports.problem("record history", problem)))
                _follow_kubelet(group, agent, options, recorded)
            if cluster is not None:
                group.create_task(keep_going("cluster", lambda: cluster(agent, options.clock), options.clock))
            if (preparing := agent.preparing) is not None and not options.labels_only:
                claims = ClaimDriver(agent, preparing, options.kubelet, options.clock)
                group.create_task(keep_going("claims", claims.run, options.clock))
            if (path := options.config_file) is not None:
                file = ConfigFile(path, options.workers("configs"), options.clock, options.intervals)
                take, report = agent.observations.take_request, agent.reports.problem
                group.create_task(keep_going("config file", lambda: file.run(take, report), options.clock))
            if options.service_manager is not None:
                group.create_task(announce_ready(options.service_manager, agent.views))
            if options.listen is not None:
                from gpuvirt.web.probes import Probes  # noqa: PLC0415  other agents do without an HTTP server

                host, port = options.listen
                probes = Probes(pages(agent))
                group.create_task(keep_going("probes", lambda: probes.run(host, port), options.clock))


def _follow_kubelet(
    group: asyncio.TaskGroup, agent: Agent, options: NodeOptions, recorded: RecordedAllocations
) -> None:
    resend = _start_plugins(group, agent, options)
    account = AccountWatch(
        options.kubelet,
        recorded,
        lambda: read_kubelets(options.kernel),
        options.clock,
        options.intervals,
        resend,
        lacks_api=options.plugin_only,
    )
    group.create_task(keep_going("account watch", lambda: account.run(agent.observations), options.clock))
    group.create_task(_pass_answers(agent, recorded.inquiry))


async def _pass_answers(agent: Agent, inquiry: PodInquiry) -> None:
    """Read the kubelet's accounts again at each answer of the API server."""
    while True:
        await inquiry.answered.wait()
        agent.observations.ask_kubelet.set()


PRIVATE = 0o700
"""The mode of the agent's own folder: any process that can open the folder could lock it, and so block the agent."""


@contextmanager
def _only_agent(options: NodeOptions) -> Iterator[None]:
    """Lock the kubelet's device-plugins folder and the folder of the ledger; raise AlreadyRunningError."""
    own = options.ledger.parent
    with suppress(OSError):  # the ledger can't be written then, which the agent reports
        own.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        own.chmod(PRIVATE)
    with ExitStack() as stack:
        if not options.terms.vgpus_only and options.kubelet.device_plugins.is_dir():
            stack.enter_context(only_agent(options.kubelet.device_plugins))
        if own.is_dir():
            stack.enter_context(only_agent(own))
        yield


def _start_plugins(group: asyncio.TaskGroup, agent: Agent, options: NodeOptions) -> Callable[[], None]:
    """Start the device plugins if this agent offers devices; return the function that sends their lists again."""
    if options.terms.vgpus_only:
        return lambda: None
    compat = options.terms.settings.compat
    plugins = Plugins(
        agent,
        options.kubelet,
        options.clock,
        options.intervals,
        unknown_numa_is_node_0=compat.unknown_numa_is_node_0,
    )
    offers: list[Plugins | UnitOffer] = [plugins]
    if agent.shares is not None:
        recorded = RecordedUnits(options.kubelet, agent.shares.resource)
        accounts = Accounts(recorded.read, lambda pods: read_running_pods(options.kernel, pods))
        worker = options.workers("shares")
        dependencies = Dependencies(agent.shares, options.clock, worker, accounts, agent.gpu_claims, agent.decide)
        group.create_task(_report_shares(agent, agent.shares))
        if (proc := options.proc) is not None:
            read = partial(read_uses, options.kernel, proc)
            driver = DriverReader(options.kernel, partial(find_program, agent.shares), options.system_root)
            follower = MemoryFollower(agent.shares, read, options.workers("share use"), driver.read)
            follow = partial(follower.run, options.clock, options.intervals)
            group.create_task(keep_going("memory of shares", follow, options.clock))
        offers.append(UnitOffer(dependencies, options.kubelet, options.intervals, agent.reports.registration))
    group.create_task(_offer(offers, options))
    return plugins.resend


async def _offer(offers: Sequence[Plugins | UnitOffer], options: NodeOptions) -> None:
    """Offer devices to the kubelet, which may be installed after the agent has started."""
    folder = options.kubelet.device_plugins
    with ExitStack() as stack:
        if not folder.is_dir():
            await _wait_for(folder, options.clock)
            stack.enter_context(only_agent(folder))
        async with asyncio.TaskGroup() as group:
            for offer in offers:
                group.create_task(offer.run())


def pages(agent: Agent) -> dict[str, Callable[[], PageAnswer]]:
    """Return the pages that the agent serves."""

    def healthz() -> PageAnswer:
        return PageAnswer(200, "ok\n")

    def readyz() -> PageAnswer:
        missing = list(_not_ready(agent))
        return PageAnswer(503, "".join(f"{line}\n" for line in missing)) if missing else PageAnswer(200, "ok\n")

    def metrics_page() -> PageAnswer:
        shares = agent.shares
        given = None
        if shares is not None:
            given = metrics.ShareFigures(shares.store.records.get(), shares.refusals.counts, shares.used.get())
        return PageAnswer(200, metrics.page(agent.views.get(), agent.telemetry, given), CONTENT_TYPE)

    return {"/healthz": healthz, "/readyz": readyz, "/metrics": metrics_page}


def _not_ready(agent: Agent) -> list[str]:
    """Return the steps that are missing until pods can get the devices of this node."""
    if not agent.host_observed:
        return ["the host was not observed yet"]
    return [
        resource.not_registered_because.text
        if resource.not_registered_because
        else f"{resource.name} is not registered"
        for resource in agent.views.get().resources
        if resource.devices and not resource.registered and not resource.withheld
    ]


async def _settle_memory(clock: Clock) -> None:
    """Exclude the objects of the start from garbage collections, which shortens the slowest answers by a third.

    The start's garbage is collected after the resources are registered, since that takes some 20 ms.
    """
    gc.freeze()
    await clock.sleep(SETTLED_AFTER_S)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def _wait_for(folder: Path, clock: Clock, why: str = "no kubelet has run yet") -> None:
    """Wait until the kubelet has created its folder; an agent may start before the kubelet."""
    waited = False
    while not os.path.isdir(folder):  # noqa: PTH112, ASYNC240  a stat each second
        if not waited:
            text = "waiting for the kubelet (%s); no device is offered until the folder %s exists"
            log.warning(text, why, folder)
        waited = True
        await clock.sleep(FOLDER_CHECK_S)


def _record(options: NodeOptions, recorded: RecordedAllocations) -> KubeletRecord:
    pods = PodFolder(options.pods, lambda: has_usual_root(options.kernel)) if options.pods is not None else None
    return KubeletRecord(
        recorded.read, recorded.lost, recorded.inquiry, pods.read if pods is not None else lambda: None
    )


def _shares(options: NodeOptions, folder: Path) -> NodeShares:
    """Return the shares as they were before a restart; `folder` is that of the agent's CDI specs."""
    files = SpecFiles(folder, (*options.cdi_folders, folder))
    path = options.ledger.with_name(sharefiles.FILE)
    run = options.state_file.parent if options.state_file is not None else folder
    library = Path(options.terms.settings.shares.hami_core.library)
    limits = LimitFiles(library, options.system_root, run / limitfiles.FILE)
    shares = stored_shares(path, files, options.workers("shares.json"), options.terms.settings.shares, limits)
    mps = MpsLimits((options.driver_root, options.system_root), run / FOLDER / PIPES)
    driver = DriverLimits(options.ledger.with_name(PROGRAM))
    return replace(shares, cdi_enabled=options.cdi_enabled, mps=mps, driver=driver)


async def _report_shares(agent: Agent, shares: NodeShares) -> None:
    """Report why GPUs that are to be shared are not offered, and problems of the records, until cancelled."""
    async for state in shares.state.follow():
        agent.reports.problem("shares", state.problem or shares.store.problem)


def _who_we_are(options: NodeOptions) -> AgentView:
    return AgentView(
        version=__version__,
        pid=os.getpid(),
        started=options.clock.now(),
        plugin_only=options.plugin_only,
        vfio_nodes=options.terms.settings.vfio_nodes,
        node=options.node_name,
    )


class ConfigFile:
    """Reads a file of vGPU configs at each interval: a ConfigMap as the kubelet mounts it."""

    def __init__(self, path: Path, worker: SerialWorker, clock: Clock, intervals: Intervals) -> None:
        self._path = path
        self._worker = worker
        self._clock = clock
        self._intervals = intervals

    async def run(self, observe: Callable[[NodeRequest], None], report: Callable[[str, Reason | None], None]) -> None:
        """Read until cancelled. An unreadable file does not count as an absent one: its last configs stay in force.

        `observe` is called with the configs, `report` with the problem of the file, or None if it has none.
        """
        while True:
            problem: Reason | None = None
            try:
                text = await self._worker.run(self._read, name=f"read {self._path}", timeout_s=READ_TIMEOUT_S)
                observe(NodeRequest(configs=Observed(text)))
            except (OSError, UnicodeDecodeError, GpuvirtError) as error:
                problem = nodeproblems.config_invalid(
                    str(self._path),
                    "can't be read, so the previous vGPU configs stay in force",
                    "make it a readable file in UTF-8",
                    Seen("", str(error)),
                )
            report("config file", problem)
            await self._clock.sleep(self._intervals.config_file_s)

    def _read(self) -> ConfigText | None:
        try:
            return ConfigText(self._path.read_text(encoding="utf-8"), str(self._path))
        except FileNotFoundError:
            return None


async def announce_ready(address: str, views: Cell[NodeView]) -> None:
    """Tell systemd at this socket once the host has been observed; an error is logged.

    Services that are ordered after the agent, the kubelet's, start then. Contract: sd_notify(3), a datagram to the
    socket that the variable NOTIFY_SOCKET names; `@` begins an abstract name.
    """
    async for view in views.follow():
        if view.host_observed:
            break
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as service_manager:
            service_manager.setblocking(False)  # a full queue must not hold up the agent
            service_manager.connect("\0" + address[1:] if address.startswith("@") else address)
            service_manager.send(READY)
    except OSError as error:
        log.warning("systemd can't be told that the agent is ready: %s: %s", address, error.strerror)
