"""The lab's API server for tests of its clients: accounts, proxies and observed state."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from lab.cluster import settings
from lab.cluster.controlplane import ControlPlane

from gpuvirt.agent.claims.preparing import Preparing
from gpuvirt.agent.claims.publishing import Publishing
from gpuvirt.agent.cluster.clusterside import ClusterSide
from gpuvirt.agent.known.kubeletrecord import PodInquiry
from gpuvirt.agent.shares.nodeshares import NodeShares
from gpuvirt.clock import RealClock
from gpuvirt.facts.ids import ConfigMapName, NodeName, PodUid, ResourceName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiRefusedError, ForbiddenError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from gpuvirt.loops.cell import Cell
from gpuvirt.model.desired.observed import NodeRequest, Observed, OperandsObserved, Progress
from gpuvirt.model.offers.discovery import OS_ID_LABEL, OS_VERSION_LABEL, PRESENT_LABEL
from gpuvirt.model.offers.notice import Count
from gpuvirt.model.offers.ondemand.offer import PodEnds
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.clock import BEGINNING

ROOT = Path(__file__).parent.parent.parent
NAMESPACE = "gpuvirt"
ACCOUNT, DISCOVERER = "gpuvirt-node", "gpuvirt-discover"
MAPS = ConfigMapName("default-vgpu-devices-config")
NODE = NodeName(settings.NODE)
PATIENCE_S = 60.0


class ApiLab:
    """The API server, as its admin and as the agent's service account."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.cluster = cluster
        self.token = folder / "token"
        """The file that the agent's token is read from."""
        self.ca = cluster.ca
        self.credentials = Credentials(
            cluster.place.address,
            cluster.place.port,
            NAMESPACE,
            ca=self.ca,
            token=self.token,
        )

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = self.cluster.kubectl(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply_roles(self, file: str = "node.yaml") -> None:
        """Apply what a manifest of deploy/ lets its pods do, and their namespace; no DaemonSet."""
        manifests = list(yaml.safe_load_all((ROOT / "deploy" / file).read_text()))
        chosen = [manifest for manifest in manifests if manifest["kind"] not in {"DaemonSet", "ConfigMap"}]
        self.kubectl("apply", "-f", "-", given=yaml.safe_dump_all(chosen))

    def token_of(self, account: str = ACCOUNT, node: str = NODE) -> str:
        """Return a token as the kubelet of a node mounts it into a pod."""
        bound = ("--bound-object-kind=Node", f"--bound-object-name={node}")
        return self.kubectl("create", "token", account, "--namespace", NAMESPACE, *bound).strip()

    def label(self, *labels: str) -> None:
        """Change labels of the node: `key=value`, or `key-`."""
        self.kubectl("label", "node", NODE, "--overwrite", *labels)

    def node_field(self, path: str) -> str:
        """Return a field of the node, by its JSON path."""
        return self.kubectl("get", "node", NODE, "-o", f"jsonpath={{{path}}}")

    def discovered(self) -> tuple[str, ...]:
        """Return the values of the node's labels that a discoverer writes."""
        labels = (PRESENT_LABEL, OS_ID_LABEL, OS_VERSION_LABEL)
        return tuple(self.node_field(".metadata.labels." + label.replace(".", r"\.")) for label in labels)

    def set_configs(self, text: str | None) -> None:
        """Set the text of the ConfigMap, or delete it."""
        self.kubectl("delete", "configmap", MAPS, "--namespace", NAMESPACE, "--ignore-not-found")
        if text is not None:
            literal = f"--from-literal=config.yaml={text}"
            self.kubectl("create", "configmap", MAPS, "--namespace", NAMESPACE, literal)


def agents_api(cluster: ControlPlane, folder: Path) -> ApiLab:
    """Return the API server with the agent's roles and token, and without a ConfigMap."""
    api = _api_of(cluster, folder, ACCOUNT, "node.yaml")
    api.set_configs(None)
    return api


def discoverers_api(cluster: ControlPlane, folder: Path) -> ApiLab:
    """Return the API server with the roles of a discoverer, and its token."""
    return _api_of(cluster, folder, DISCOVERER, "discover.yaml")


def _api_of(cluster: ControlPlane, folder: Path, account: str, manifest: str) -> ApiLab:
    api = ApiLab(cluster, folder)
    api.apply_roles(manifest)
    while cluster.kubectl("get", "serviceaccount", account, "--namespace", NAMESPACE).returncode:
        time.sleep(0.1)  # noqa: TID251  the controller manager's time
    api.token.write_text(api.token_of(account))
    return api


@dataclass
class Listener:
    """An agent, reduced to its observation of the API server."""

    desired: NodeRequest = field(default_factory=NodeRequest)
    vgpus: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    workload: Cell[Progress | None] = field(default_factory=lambda: Cell(None))
    views: Cell[NodeView] = field(default_factory=lambda: Cell(NodeView(at=BEGINNING)))
    operands_away: Cell[bool] = field(default_factory=lambda: Cell(False))
    node_counts: Cell[Mapping[ResourceName, Count]] | None = None
    pod_inquiry: PodInquiry = field(default_factory=PodInquiry)
    shares: NodeShares | None = None
    preparing: Preparing | None = None
    publishing: Publishing | None = None
    counted: Mapping[ResourceName, int] | None = None
    operands: OperandsObserved | None = None
    problems: dict[str, Reason] = field(default_factory=dict)
    codes: list[ReasonCode] = field(default_factory=list)
    """Everything that was ever wrong."""
    kind_exists: bool | None = None
    """Whether there is the kind GpuNode."""
    on_demand_pods: frozenset[PodUid] = frozenset()
    pod_ends: PodEnds = field(default_factory=PodEnds)
    failures: int = 0
    """How often it is still to fail at what it hears."""

    @property
    def observations(self) -> "Listener":
        return self

    @property
    def reports(self) -> "Listener":
        return self

    def wants(self, config: str) -> bool:
        return self.desired.config == Observed(config)

    def take_request(self, delta: NodeRequest) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a fault of the follower")
        self.desired = self.desired.updated(delta)

    def observe_kind(self, *, exists: bool) -> None:
        self.kind_exists = exists

    def observe_node_counts(self, counts: Mapping[ResourceName, int]) -> None:
        self.counted = counts

    def observe_pod_ends(self, ends: PodEnds) -> None:
        self.pod_ends = ends

    def observe_operands(self, observed: OperandsObserved | None) -> None:
        self.operands = observed

    def problem(self, who: str, problem: Reason | None) -> None:
        self.problems.pop(who, None)
        if problem is not None:
            self.problems[who] = problem
            self.codes.append(problem.code)


class Proxy:
    """A proxy between an agent and the API server that breaks connections."""

    def __init__(self, host: str, port: int) -> None:
        self._server = host, port
        self.open = True
        """Whether new connections are taken."""
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Break all connections in the middle of a response."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        out = None
        try:
            if self.open:
                upstream, out = await asyncio.open_connection(*self._server)
                self._writers.add(out)
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, out))
                    group.create_task(self._pass(upstream, writer))
        except OSError:
            pass  # the API server is stopped, so the proxy is unreachable, too
        finally:
            for stream in filter(None, (writer, out)):
                stream.transport.abort()
                self._writers.discard(stream)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while part := await reader.read(65536):
                writer.write(part)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def proxied(credentials: Credentials) -> AsyncIterator[tuple[Proxy, Credentials]]:
    """Run a proxy; return it with credentials that connect through it."""
    proxy, tasks = Proxy(credentials.host, credentials.port), set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(group.create_task(proxy.serve(reader, writer)))

    async with asyncio.TaskGroup() as group:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        try:
            yield proxy, replace(credentials, host="127.0.0.1", port=port, server_name=credentials.host)
        finally:
            server.close()
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def following(
    credentials: Credentials, listener: Listener | None = None, *, gpu_nodes: bool = False
) -> AsyncIterator[Listener]:
    """Observe the API server for as long as the context lasts."""
    listener = listener or Listener()
    side = ClusterSide(credentials, NODE, MAPS, gpu_nodes=gpu_nodes)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(side.run(listener, RealClock()))
        try:
            yield listener
        finally:
            running.cancel()
    # asyncio closes a TLS connection that is cancelled at its start only after the handshake.
    await RealClock().sleep(0.1)


async def until(met: Callable[[], bool], seen: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    clock = RealClock()
    deadline_s = clock.monotonic_s() + within_s
    while not met():
        assert clock.monotonic_s() < deadline_s, seen()
        await clock.sleep(0.02)


async def until_guarded(client: Client) -> None:
    """Wait until the role and the admission policy of an account are in force, which takes the API server a while."""
    for number in itertools.count():
        try:
            changed = {"metadata": {"annotations": {"example.com/guarded": str(number)}}}
            await client.patch(NODES, NODE, changed, PatchType.MERGE, Node)
        except ApiRefusedError:
            return
        except ForbiddenError:
            pass
        await RealClock().sleep(0.1)
