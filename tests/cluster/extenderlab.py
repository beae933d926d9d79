"""Extenders beside the lab's API server and a real kube-scheduler, over nodes that are objects alone."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import msgspec
import yaml
from lab.cluster.cluster import Cluster

from gpuvirt.clock import RealClock
from gpuvirt.cluster.shares.objects import SharingPod
from gpuvirt.model.shares.annotations import PodShares
from gpuvirt.model.shares.quantities import units_of

SCHEDULER = "gpuvirt-scheduler"
RESOURCE = "nvidia.com/vgpu"
PATIENCE_S = 90.0
CLOCK = RealClock()
GPUVIRT = [sys.executable, "-m", "gpuvirt"]


class _Pods(msgspec.Struct):
    items: list[SharingPod]


def until(met: Callable[[], bool], seen: Callable[[], object], within_s: float = PATIENCE_S) -> float:
    """Wait until a condition holds, and return the seconds that it took."""
    began_s = CLOCK.monotonic_s()
    while not met():
        assert CLOCK.monotonic_s() - began_s < within_s, seen()
        time.sleep(0.1)  # noqa: TID251  for programs outside
    return CLOCK.monotonic_s() - began_s


class Service:
    """What a Service does for the extender: each new connection goes to a replica that is ready."""

    def __init__(self) -> None:
        self.replicas: list[int] = []
        """The ports of the replicas."""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._started = self._loop.create_future()

    @contextmanager
    def running(self) -> Iterator["Service"]:
        """Serve on a thread of its own."""
        thread = Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        thread.start()
        until(lambda: self.port != 0, lambda: "the service does not listen")
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._started.set_result, None)
            thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        tasks = set[asyncio.Task[None]]()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._pass_on(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        await self._started
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        out: asyncio.StreamWriter | None = None
        try:
            for port in self.replicas:
                if await self._is_ready(port):
                    upstream, out = await asyncio.open_connection("127.0.0.1", port)
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_copy(reader, out))
                        group.create_task(_copy(upstream, writer))
                    return
        except OSError:
            pass
        finally:
            for stream in filter(None, (writer, out)):
                stream.transport.abort()

    async def _is_ready(self, port: int) -> bool:
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(0.5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    return b" 200 " in await reader.readline()
                finally:
                    writer.transport.abort()
        return False


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.transport.abort()


@dataclass
class Replica:
    """One process of the extender."""

    process: "subprocess.Popen[bytes]"
    port: int

    @property
    def is_ready(self) -> bool:
        """Whether the process leads and has its index."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """Return a value of the metrics page, by its name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@dataclass
class ExtenderLab:
    """The API server, a kube-scheduler with the extender, and the replicas."""

    cluster: Cluster
    service: Service
    folder: Path
    replicas: list[Replica] = field(default_factory=list)
    capacity: dict[str, dict[str, int]] = field(default_factory=dict)
    """The units of each GPU of each node that was ever there."""

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = self.cluster.kubectl(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects: Mapping[str, object]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", given=yaml.safe_dump_all(objects))

    def make_nodes(self, count: int, gpus: int = 2, units: int = 1000) -> Sequence[str]:
        """Create nodes, each with some GPUs, and return their names."""
        names = [f"share{number:02}" for number in range(count)]
        for name in names:
            self.capacity[name] = {f"GPU-{name}-{gpu}": units for gpu in range(gpus)}
            annotations = {"gpuvirt.io/shared-gpus": json.dumps(self.capacity[name])}
            labels = {"gpuvirt.io/share-test": "true"}
            metadata = {"name": name, "annotations": annotations, "labels": labels}
            self.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
            amounts = {"cpu": "64", "memory": "64Gi", "pods": "110", RESOURCE: str(gpus * units)}
            ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "an object alone"}
            status = {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}}
            self.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", json.dumps(status))
        return names

    def deploy(self, name: str, replicas: int, units: int, priority: str = "") -> None:
        """Create a Deployment of pods, each with some units."""
        quantities = {RESOURCE: str(units)}
        spec = {
            "schedulerName": SCHEDULER,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"gpuvirt.io/share-test": "true"},
            "containers": [{"name": "main", "image": "none", "resources": {"limits": quantities}}],
            **({"priorityClassName": priority} if priority else {}),
        }
        template = {"metadata": {"labels": {"app": name}}, "spec": spec}
        content = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        self.apply({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": content})

    def pods(self) -> Sequence[SharingPod]:
        """Return the pods of the tests as the API server has them."""
        found = self.cluster.api.get("/api/v1/namespaces/default/pods")
        assert found is not None
        return msgspec.json.decode(found, type=_Pods).items

    def bound(self, name: str = "") -> int:
        """Return how many pods of a Deployment have a node."""
        return sum(bool(pod.spec.node_name) and pod.metadata.name.startswith(name) for pod in self.pods())

    def assert_not_overcommitted(self) -> None:
        """Check by the API's pods alone that no GPU has more than its units, and that each pod has what it requests."""
        taken: Counter[tuple[str, str]] = Counter()
        for pod in self.pods():
            if not pod.spec.node_name:
                continue
            shares = msgspec.json.decode(pod.metadata.annotations.shares, type=PodShares).containers
            for container in pod.spec.containers:
                assert sum(shares[container.name].values()) == units_of(container.resources.requests[RESOURCE])
            for given in shares.values():
                taken.update({(pod.spec.node_name, gpu): units for gpu, units in given.items()})
        over = {key: units for key, units in taken.items() if units > self.capacity[key[0]].get(key[1], 0)}
        assert over == {}

    def start_replica(self, port: int) -> Replica:
        """Start a process of the extender."""
        command = [*GPUVIRT, "extender", "--listen", f"127.0.0.1:{port}", "--namespace", "default"]
        command += ["--kubeconfig", str(self.cluster.kubeconfig)]
        with (self.folder / f"extender-{port}.log").open("ab") as log:
            replica = Replica(subprocess.Popen(command, stdout=log, stderr=log), port)
        self.replicas.append(replica)
        self.service.replicas.append(port)
        return replica

    def leader(self) -> Replica:
        """Wait for the replica that is ready, and return it."""
        until(lambda: any(one.is_ready for one in self.replicas), self.logs)
        return next(one for one in self.replicas if one.is_ready)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in self.folder.glob("*.log"))


def _scheduler_config(kubeconfig: Path, port: int) -> Mapping[str, object]:
    extender = {
        "urlPrefix": f"http://127.0.0.1:{port}",
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "weight": 5,
        "nodeCacheCapable": True,
        "ignorable": False,
        "httpTimeout": "5s",
        "managedResources": [{"name": RESOURCE, "ignoredByScheduler": False}],
    }
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 2000},
        "podMaxBackoffSeconds": 2,
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [extender],
    }


@contextmanager
def extender_lab(cluster: Cluster, folder: Path) -> Iterator[ExtenderLab]:
    """Run a kube-scheduler with an extender behind a service, and end it and the replicas."""
    with Service().running() as service:
        lab = ExtenderLab(cluster, service, folder)
        config = folder / "scheduler.yaml"
        config.write_text(yaml.safe_dump(_scheduler_config(cluster.kubeconfig, service.port)))
        command = [str(cluster.binaries / "kube-scheduler"), f"--config={config}", "--secure-port=0", "-v=2"]
        with (folder / "scheduler.log").open("wb") as log:
            scheduler = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield lab
        finally:
            for process in (scheduler, *(replica.process for replica in lab.replicas)):
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(20)
            cluster.kubectl("delete", "deployments", "--all", "--namespace", "default")
            cluster.kubectl("delete", "pods", "--all", "--force", "--namespace", "default")
            cluster.kubectl("delete", "nodes", "-l", "gpuvirt.io/share-test=true")
