"""A real node for tests: pods by kubectl, a mounted host as hardware, the agent as a process or in a pod."""

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.cluster import hardware, settings
from lab.cluster.cluster import KUBELET_ROOT, Cluster
from lab.cluster.leftovers import VFIO, clear_nodes
from typing_extensions import override

from gpuvirt.agent.kubelet.podresources import PodResourcesUnknownError, ask_allocatable
from gpuvirt.paths import KubeletPaths
from tests.cluster.labnamespace import BOX, GPUVIRT, PATIENCE_S, LabNamespace

POD_RESOURCES = KubeletPaths(KUBELET_ROOT).pod_resources_socket
SHOW = "env | grep PCI_RESOURCE; ls /dev/vfio"


@dataclass(frozen=True, slots=True)
class PodRequest:
    """The devices that a pod requests, and its command."""

    limits: Mapping[str, int]
    script: str = SHOW
    init: Mapping[str, int] = field(default_factory=dict)
    """The devices that its init container requests."""
    restarts: bool = False
    """Whether the kubelet starts its container again when it ends."""


class LabNode(LabNamespace):
    """The real node, and a namespace for one test."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        super().__init__(cluster, namespace)
        self._real = cluster
        self.host = cluster.folder / settings.HOST
        """The host's `/`, where one is mounted."""

    @property
    @override
    def cluster(self) -> Cluster:
        return self._real

    # --- its hardware

    @contextmanager
    def simulated_host(self, name: str) -> Iterator[Path]:
        """Mount a simulated host, and create its device nodes in the real `/dev`, where containers get them from."""
        self.host.mkdir(exist_ok=True)
        command = [*GPUVIRT, "sim", "mount", "--host", name, "--vgpu-manager", "none", str(self.host)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert "is mounted at" in server.stdout.readline()
                clear_nodes()
                VFIO.mkdir()
                self.make_nodes()
                yield self.host
            finally:
                server.terminate()
                clear_nodes()

    @contextmanager
    def cdi_folder(self) -> Iterator[Path]:
        """Show the lab's folder of CDI specs as the mounted host's `/run/cdi`, also in pods."""
        with hardware.cdi_folder(self.cluster.folder) as found:
            yield found

    def make_nodes(self) -> None:
        """Create the host's missing device nodes in the real `/dev`: those of vGPUs appear at run time."""
        hardware.make_nodes(self.host)

    @contextmanager
    def nodes_kept(self) -> Iterator[None]:
        """Create device nodes as they appear, for as long as the context lasts."""
        over = threading.Event()

        def keep() -> None:
            while not over.wait(0.1):
                with suppress(OSError):  # device nodes appear and vanish meanwhile
                    self.make_nodes()

        keeper = threading.Thread(target=keep)
        keeper.start()
        try:
            yield
        finally:
            over.set()
            keeper.join()

    @contextmanager
    def agent(self, config: str = "", options: Sequence[str] = ()) -> Iterator["subprocess.Popen[str]"]:
        """Run the agent on that host, as a process of the real host."""
        (self.host / "etc").mkdir(exist_ok=True)
        file = self.host / "etc/node.yaml"
        file.write_text(config)
        options = [
            "--host-root",
            str(self.host),
            "--config",
            str(file),
            "--listen",
            "",
            "--log-format",
            "json",
            *options,
        ]
        log = self.cluster.folder / "log/agent.log"
        with log.open("a") as output, subprocess.Popen([*GPUVIRT, "node", *options], stderr=output, text=True) as agent:
            try:
                yield agent
            finally:
                agent.send_signal(signal.SIGTERM)
                agent.wait(PATIENCE_S)

    # --- pods

    def start(self, name: str, desired: PodRequest) -> None:
        """Create a pod."""
        self.apply(self._pod(name, desired))

    def start_all(self, requests: Mapping[str, PodRequest]) -> None:
        """Create many pods at once."""
        self.apply(
            {
                "apiVersion": "v1",
                "kind": "List",
                "items": [self._pod(name, request) for name, request in requests.items()],
            }
        )

    def _pod(self, name: str, desired: PodRequest) -> Mapping[str, object]:
        init = [_container("first", desired.init, SHOW)] if desired.init else []
        spec = {
            "restartPolicy": "Always" if desired.restarts else "Never",
            "dnsPolicy": "Default",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "initContainers": init,
            "containers": [_container("compute", desired.limits, desired.script)],
        }
        metadata = {"name": name, "namespace": self.namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def run(self, name: str, desired: PodRequest) -> Sequence[str]:
        """Create a pod, wait until it succeeds, and return its output."""
        self.start(name, desired)
        self.until(lambda: self.status(name).phase in {"Succeeded", "Failed"}, lambda: str(self.status(name)))
        assert self.status(name).phase == "Succeeded", (self.status(name), self.output(name))
        return self.output(name)

    def output(self, name: str, container: str = "compute") -> Sequence[str]:
        """Return the output of a container, from the kubelet's log files.

        A container has a log for each time that the kubelet made it; the last one counts. A kubelet that is killed
        between making and starting a container makes another one.
        """
        logs = Path("/var/log/pods").glob(f"{self.namespace}_{name}_*/{container}/*.log")
        last = sorted(logs, key=lambda log: int(log.stem))[-1:]
        return [line.split(" ", 3)[3] for log in last for line in log.read_text().splitlines()]

    def devices(self, name: str) -> set[str]:
        """Return the devices of a pod that prints its environment; the pod may still run."""

        def printed() -> Sequence[str]:
            return [line for line in self.output(name) if "PCI_RESOURCE" in line]

        self.until(
            lambda: bool(printed()), lambda: f"{name} has printed {self.output(name)}: {self.status(name)} {self.log}"
        )
        return devices_of(printed())

    # --- the node

    def counted(self, resource: str) -> int:
        """Return the kubelet's own allocatable count of a resource; empty while it does not answer."""
        try:
            return sum(1 for name, _ in ask_allocatable(POD_RESOURCES) if name == resource)
        except PodResourcesUnknownError:
            return 0

    def until_counted(self, resource: str, count: int) -> None:
        """Wait for a count of the kubelet; the Node's status may be from before its restart."""
        self.until(lambda: self.counted(resource) == count, lambda: f"{resource}: {self.counted(resource)} {self.log}")

    @property
    def log(self) -> str:
        """The last lines of the agents that ran on the host, after those of the kubelet."""
        logs = (self.cluster.folder / f"log/{name}.log" for name in ("kubelet", "agent"))
        return "\n".join(f"{log.name}: {log.read_text()[-4000:]}" for log in logs if log.exists())

    def until_allocatable(self, resource: str, count: int) -> None:
        """Wait for the same count in the kubelet and in the Node's status.

        The kubelet first: just after its restart the Node's status has the previous count, and the kubelet starts a pod
        that requests an unregistered resource without any device (seen with 1.36.3).
        """
        self.until_counted(resource, count)
        self.until(lambda: self.allocatable(resource) == count, lambda: f"{resource}: {self.allocatable(resource)}")


def devices_of(lines: Sequence[str]) -> set[str]:
    """Return the devices in a pod's printed environment."""
    (line,) = (line for line in lines if "PCI_RESOURCE" in line)
    return set(line.partition("=")[2].split(","))


@contextmanager
def lab_node(cluster: Cluster, namespace: str) -> Iterator[LabNode]:
    """Give a namespace for the duration of the context, on a node without device plugins."""
    node = LabNode(cluster, namespace)
    try:
        with node.existing():
            yield node
    finally:
        _forget_plugins(cluster)


def _forget_plugins(cluster: Cluster) -> None:
    """Restart the kubelet without its device plugins, unless it has none."""
    folder = KUBELET_ROOT / "device-plugins"
    if cluster.runs("kubelet") and {path.name for path in folder.iterdir()} <= {"kubelet.sock"}:
        return
    cluster.stop("kubelet")
    for path in folder.iterdir():
        if path.is_socket() or path.is_file():
            path.unlink()
    cluster.start_kubelet()


def _container(name: str, limits: Mapping[str, int], script: str) -> Mapping[str, object]:
    counts = {resource: str(count) for resource, count in limits.items()}
    return {
        "name": name,
        "image": BOX,
        "imagePullPolicy": "Never",
        "args": [script],
        "resources": {"limits": counts},
    }
