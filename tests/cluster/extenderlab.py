"""Extenders beside the lab's API server and a real kube-scheduler, over nodes that are objects alone."""

import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml
from lab.cluster.controlplane import ControlPlane

from gpuvirt.clock import RealClock
from gpuvirt.controller.scheduler import Tls, extender
from gpuvirt.extender.process import EXTENDER_LEASE
from gpuvirt.facts.ids import ResourceName
from gpuvirt.shares.objects import SharingPod
from tests.cluster.cutoff import CutOff
from tests.cluster.extenderservice import EXTENDER, QUESTION, Service, is_of_leader
from tests.cluster.sharenodes import ShareNodes
from tests.web.certificates import Authority, Pair

SCHEDULER = "gpuvirt-scheduler"
RESOURCE = "nvidia.com/vgpu"
CLIENT = "kube-scheduler"
"""The name in the certificate of kube-scheduler."""
PATIENCE_S = 90.0
METRICS = 100
"""How far the port of metrics and probes is from that of the verbs."""
CLOCK = RealClock()
GPUVIRT = [sys.executable, "-m", "gpuvirt"]


def until(met: Callable[[], bool], seen: Callable[[], object], within_s: float = PATIENCE_S) -> float:
    """Wait until a condition holds, and return the seconds that it took."""
    began_s = CLOCK.monotonic_s()
    while not met():
        assert CLOCK.monotonic_s() - began_s < within_s, seen()
        time.sleep(0.1)  # noqa: TID251  for programs outside
    return CLOCK.monotonic_s() - began_s


@dataclass
class Replica:
    """One process of the extender."""

    process: "subprocess.Popen[bytes]"
    port: int
    address: str

    @property
    def is_ready(self) -> bool:
        """Whether the process answers requests, or could take over."""
        try:
            return bool(self.page("/readyz"))
        except OSError:
            return False

    @property
    def serves(self) -> bool:
        """Whether the process answers requests of kube-scheduler."""
        try:
            return self.metric("gpuvirt_extender_ready") == 1.0
        except OSError:
            return False

    def metric(self, name: str) -> float:
        """Return a value of the metrics page, by its name with labels."""
        lines = self.page("/metrics").splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def knows(self, pod: SharingPod) -> bool:
        """Return whether the leader has observed a pod: then it refuses a node that does not exist."""
        names = {"PodName": pod.metadata.name, "PodNamespace": pod.metadata.namespace, "PodUID": pod.uid}
        body = msgspec.json.encode({**names, "Node": "no-such-node"})
        request = urllib.request.Request(
            f"http://{self.address}:{self.port}/bind", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return b"does not fit on node no-such-node" in answer.read()

    def page(self, path: str) -> str:
        """Return a page; raises OSError, also where it is an error."""
        with urllib.request.urlopen(f"http://{self.address}:{self.port + METRICS}{path}", timeout=1) as found:
            return str(found.read().decode())


@dataclass
class ExtenderLab(ShareNodes):
    """The API server, a kube-scheduler with the extender, and the replicas."""

    service: Service
    folder: Path
    certificate: Pair | None = None
    """The certificate of the replicas; None: HTTP."""
    client_ca: Path | None = None
    """The CA of the certificates that the replicas require of clients."""
    replicas: list[Replica] = field(default_factory=list)
    scheduler: "subprocess.Popen[bytes] | None" = None

    @contextmanager
    def paused_scheduler(self) -> Iterator[None]:
        """Have kube-scheduler place no pod for the duration of the context."""
        assert self.scheduler is not None
        self.scheduler.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.scheduler.send_signal(signal.SIGCONT)

    def start_replica(self, port: int, *, network: CutOff | None = None, kubeconfig: Path | None = None) -> Replica:
        """Start a process of the extender, in the host's network or in another one."""
        address = self.cluster.place.address if network is None else network.address
        command = [*GPUVIRT, "extender", "--listen", f":{port}", "--metrics-listen", f":{port + METRICS}"]
        command += ["--namespace", "default"]
        command += ["--kubeconfig", str(kubeconfig or self.cluster.kubeconfig)]
        command += ["--service", EXTENDER, "--pod-ips", address]
        if (pair := self.certificate) is not None:
            command += ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
        if self.client_ca is not None:
            command += ["--client-ca", str(self.client_ca), "--client-name", CLIENT]
        command = network.command(command) if network is not None else command
        with (self.folder / f"extender-{port}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        replica = Replica(process, port, address)
        self.replicas.append(replica)
        return replica

    def make_service(self) -> None:
        """Create the extender's Service, as the chart does."""
        ports = [{"name": "http", "port": 8888, "targetPort": 8888}]
        self.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": EXTENDER}, "spec": {"ports": ports}})

    def leads_to(self, replica: Replica) -> bool:
        """Return whether the Service leads to a replica."""
        return self.service.address == (replica.address, replica.port)

    def leads_by_cluster_ip(self) -> bool:
        """Return whether the node's proxy leads to a replica that serves; raises OSError."""
        address = self.kubectl("get", "service", EXTENDER, "-o", "jsonpath={.spec.clusterIP}")
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{address}:8888/filter", QUESTION, headers)
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310  of this computer
            return is_of_leader(answer.read())

    def lease_holder(self) -> str:
        """Return the identity of the process that has the lease; "" where it was given back."""
        return self.kubectl("get", "lease", EXTENDER_LEASE, "-o", "jsonpath={.spec.holderIdentity}")

    def leader(self) -> Replica:
        """Wait until a replica serves and the Service leads to it, and return the replica."""
        until(lambda: any(replica.serves and replica.is_ready for replica in self.replicas), self.logs)
        return next(replica for replica in self.replicas if replica.serves)

    def start_for_pods(self, port: int) -> None:
        """Start one process of the extender, and wait until pods can be created and are placed."""
        self.start_replica(port)
        self.leader()
        account = ("get", "serviceaccount", "default", "--namespace", "default")
        until(lambda: self.cluster.kubectl(*account).returncode == 0, self.logs)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in self.folder.glob("*.log"))


def _scheduler_config(kubeconfig: Path, port: int, tls: Tls | None) -> Mapping[str, object]:
    scheme = "http" if tls is None else "https"
    entry = extender(f"{scheme}://127.0.0.1:{port}", (ResourceName(RESOURCE),), tls)
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 2000},
        "podMaxBackoffSeconds": 2,
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [msgspec.to_builtins(entry)],
    }


@contextmanager
def extender_lab(
    cluster: ControlPlane, folder: Path, authority: Authority | None = None, *, own: Pair | None = None, gates: str = ""
) -> Iterator[ExtenderLab]:
    """Run a kube-scheduler with an extender behind a service, and end it and the replicas.

    With `authority`, kube-scheduler connects by TLS, and accepts the certificates of this authority. With `own`, it
    shows this certificate, and the replicas require one of the same authority. `gates` are features of kube-scheduler
    that are switched on.
    """
    certificate, tls, client_ca = None, None, None
    if authority is not None:
        name = f"{EXTENDER}.default.svc"
        certificate = authority.server("extender", alternatives=f"DNS:{name}")
        tls = Tls(str(authority.certificate), name)
        if own is not None:
            tls = Tls(str(authority.certificate), name, str(own.certificate), str(own.key))
            client_ca = authority.certificate
    with Service(cluster).running() as service:
        lab = ExtenderLab(cluster, service, folder, certificate, client_ca)
        lab.make_service()
        config = folder / "scheduler.yaml"
        config.write_text(yaml.safe_dump(_scheduler_config(cluster.kubeconfig, service.port, tls)))
        command = [str(cluster.binaries / "kube-scheduler"), f"--config={config}", "--secure-port=0", "-v=2"]
        command += [f"--feature-gates={gates}"] if gates else []
        with (folder / "scheduler.log").open("wb") as log:
            scheduler = lab.scheduler = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield lab
        finally:
            for process in (scheduler, *(replica.process for replica in lab.replicas)):
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(20)
            lab.clear()
            cluster.kubectl("delete", "service", EXTENDER, "--namespace", "default")
