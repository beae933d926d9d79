"""A node that shares GPUs as the guide of docs/sharing.md makes it one, and all views of who has which units."""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import msgspec
from lab.cluster import settings
from lab.cluster.schedulerimage import import_kube_scheduler

from gpuvirt.agent.shares import sharefiles
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.kinds.gpunode import Status as GpuNodeStatus
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION, PodShares
from gpuvirt.model.shares.node.records import ShareRecords
from gpuvirt.model.shares.overview import SharesOverview
from tests.cli.commandline import gpuvirt
from tests.cluster.chartlab import CHART, NAMESPACE, Install, on_simulated_host
from tests.cluster.clusterlab import LabNode
from tests.cluster.controllerlab import PRESENT, WORKLOAD
from tests.cluster.nvidiastoolkit import nvidias_toolkit
from tests.cluster.sharingpods import VGPU, Container, Part, Pod, Pods, Printed

SCHEDULER = "gpuvirt-scheduler"
EXTENDER_PORT = 8888
"""The port at which kube-scheduler asks the extender; metrics have another."""


class Blocker(msgspec.Struct):
    """Fields of what blocks a pod."""

    code: str
    subject: str
    message: str
    fix: tuple[str, ...]


class _Explanation(msgspec.Struct):
    blocker: Blocker | None


class SharingLab:
    """The node, its GPUs, and the pods of a test."""

    def __init__(self, user: Install, node: LabNode, gpus: Sequence[str]) -> None:
        self.user = user
        self.node = node
        self.gpus = list(gpus)
        """In an order of the test's own."""
        self.minors = {gpu: minor for minor, gpu in enumerate(gpus)}
        self.cdi = node.host / "run/cdi"

    # --- the install

    def install(self) -> str:
        """Follow docs/sharing.md until the node offers units; return the release's name."""
        user = self.user
        release = user.installed("sandboxWorkloads.enabled=true", *on_simulated_host(self.node))
        image = {"repository": import_kube_scheduler(user.cluster, "v1"), "tag": "v1", "pullPolicy": "Never"}
        values = ("extender.enabled=true", "scheduler.enabled=true")
        sets = [
            f"--set={setting}"
            for setting in (*values, *(f"scheduler.image.{key}={value}" for key, value in image.items()))
        ]
        controllers = ("pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=controller")
        before = user.kubectl("get", *controllers, "-o", "name").split()
        user.must("upgrade", release, str(CHART), "-n", NAMESPACE, "--wait", "--reset-then-reuse-values", *sets)
        # With the settings from before, a controller would deploy an agent that the next one replaces at once.
        user.kubectl("wait", "--for=delete", "-n", NAMESPACE, *before, "--timeout=60s")
        user.kubectl("label", "node", settings.NODE, "--overwrite", f"{PRESENT}=true", f"{WORKLOAD}=shared")
        self.node.until_allocatable(VGPU, 1000 * len(self.gpus))
        return release

    # --- pods

    def start(self, scheduler: str = SCHEDULER, **pods: Sequence[Part]) -> None:
        """Create pods at once."""
        items = [self._manifest(name, parts, scheduler) for name, parts in pods.items()]
        self.node.apply({"apiVersion": "v1", "kind": "List", "items": items})

    def _manifest(self, name: str, parts: Sequence[Part], scheduler: str) -> Mapping[str, object]:
        spec = {
            "schedulerName": scheduler,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "initContainers": [part.manifest for part in parts if part.init],
            "containers": [part.manifest for part in parts if not part.init],
        }
        metadata = {"name": name, "namespace": self.node.namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}

    def pods(self) -> Mapping[str, Pod]:
        """Return the pods of the test as the API server has them."""
        found = self.node.cluster.api.get(f"/api/v1/namespaces/{self.node.namespace}/pods")
        assert found is not None
        return {pod.metadata.name: pod for pod in msgspec.json.decode(found, type=Pods).items}

    def annotated(self, name: str) -> Mapping[str, Mapping[str, int]]:
        """Return the units of each container of a pod by its annotation."""
        text = self.pods()[name].metadata.annotations[SHARES_ANNOTATION]
        return msgspec.json.decode(text, type=PodShares).containers

    def printed(self, name: str, container: str = "main", attempt: int = 0, namespace: str = "") -> Printed:
        """Wait until an attempt of a container has printed what it sees, and return that."""
        logs = f"{namespace or self.node.namespace}_{name}_*/{container}/{attempt}.log"

        def lines() -> Sequence[str]:
            found = (path.read_text().splitlines() for path in Path("/var/log/pods").glob(logs))
            return [line.split(" ", 3)[3] for text in found for line in text]

        self.node.until(lambda: "end" in lines(), lambda: f"{name} has printed {lines()}\n{self.user.pods()}")
        env = dict(line.split("=", 1) for line in lines() if "=" in line)
        assert env["NVIDIA_VISIBLE_DEVICES"] == "void", "its own environment gives a pod no GPU"
        nodes = frozenset(line for line in lines() if re.fullmatch(r"nvidia\d+", line))
        return Printed(frozenset(env["GPUVIRT_GPUS"].split(",")), int(env["GPUVIRT_UNITS"]), nodes)

    def after_a_restart(self, name: str) -> Printed:
        """End the container of a pod, and return what it prints when it has started again."""

        def container() -> Container:
            return self.pods()[name].status.container_statuses[0]

        before = container()
        killed = self.user.cluster.containerd("tasks", "kill", "-s", "SIGKILL", before.id.removeprefix("containerd://"))
        assert killed.returncode == 0, killed.stderr
        self.node.until(lambda: container().restarts > before.restarts, lambda: str(self.node.status(name)))
        return self.printed(name, attempt=container().restarts)

    def assert_has_what_it_prints(self, name: str, *containers: str) -> None:
        """Check that each container has printed the GPUs and units of the pod's annotation, and of the records."""
        printed = {container: self.printed(name, container) for container in containers or ("main",)}
        annotated, uid = self.annotated(name), self.pods()[name].metadata.uid
        assert {container: dict(units) for container, units in annotated.items()} == {
            container: share.gpus for container, share in self.records.pods[PodUid(uid)].containers.items()
        }
        for container, seen in printed.items():
            assert seen.gpus == annotated[container].keys()
            assert seen.units == sum(annotated[container].values())
            assert seen.nodes == {f"nvidia{self.minors[gpu]}" for gpu in seen.gpus}

    def unscheduled(self, name: str) -> str:
        """Return why a pod has no node, empty if it has one."""
        found = (
            condition
            for condition in self.pods()[name].status.conditions
            if (condition.type, condition.status) == ("PodScheduled", "False")
        )
        return next((condition.message for condition in found), "")

    # --- views of who has which units

    @property
    def records(self) -> ShareRecords:
        """The agent's records, as they are on its disk."""
        path = self.node.host / "var/lib/gpuvirt" / sharefiles.FILE
        return sharefiles.FORMAT.decode(path.read_bytes()).value

    @property
    def specs(self) -> Sequence[str]:
        """The CDI specs of shares."""
        return sorted(path.name for path in self.cdi.glob("*share-*"))

    def shares(self) -> SharesOverview:
        """Return the output of `gpuvirt shares -o json`."""
        return msgspec.json.decode(self.gpuvirt("shares", "-o", "json").stdout, type=SharesOverview)

    def gpuvirt(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command as the cluster's admin."""
        return gpuvirt(*arguments, "--kubeconfig", str(self.user.cluster.kubeconfig))

    def why(self, name: str) -> Blocker | None:
        """Return what blocks a pod by `gpuvirt why pod/NAME`, None if nothing does."""
        done = self.gpuvirt("why", f"pod/{name}", "-n", self.node.namespace, "-o", "json")
        found = msgspec.json.decode(done.stdout, type=_Explanation).blocker
        assert done.returncode == (0 if found is None else 1), done.stderr
        return found

    def metrics(self, component: str, port: int) -> Mapping[str, float]:
        """Return the metrics page of the ready pod of a component, by the name and labels of each value."""
        page = [line for line in self.answer(component, port, "/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in page)}

    def answer(self, component: str, port: int, path: str, body: object = None) -> str:
        """Return the answer of the ready pod of a component; to a POST, where there is a body."""
        self.node.until(lambda: self._address(component, port) != "", self.user.pods)
        address = self._address(component, port)
        content = json.dumps(body).encode() if body is not None else None
        with closing(HTTPConnection(address, port, timeout=10)) as connection:
            connection.request("POST" if content else "GET", path, content, {"Content-Type": "application/json"})
            return connection.getresponse().read().decode()

    def _address(self, component: str, port: int) -> str:
        """Return the address of the extender's Service, for its metrics of the pod that leads, or of the ready pod."""
        if (component, port) == ("extender", EXTENDER_PORT):
            return self.user.get("service/gpuvirt-extender", ".spec.clusterIP")
        if component == "extender":
            leader = self.user.get("lease/gpuvirt-extender", ".spec.holderIdentity").partition("_")[0]
            return self.user.get(f"pod/{leader}", ".status.podIP") if leader else ""
        ready = "{range .items[*]}{.status.podIP} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"
        selected = ("-l", f"app.kubernetes.io/component={component}")
        lines = self.user.kubectl("get", "pods", "-n", NAMESPACE, *selected, "-o", f"jsonpath={ready}").splitlines()
        return next((line.split()[0] for line in lines if line.endswith(" True")), "")

    def used_by_records(self) -> Mapping[str, int]:
        used = dict.fromkeys(self.gpus, 0)
        for pod in self.records.pods.values():
            for gpu, units in pod.placement.used.items():
                used[gpu] += units
        return used

    def used_by_shares(self) -> Mapping[str, int]:
        (found,) = (node for node in self.shares().nodes if node.node == settings.NODE)
        used: dict[str, int] = {gpu.gpu: gpu.used for gpu in found.gpus}
        if found.unplaced:  # until the agent has written the annotation of a pod that no extender has placed
            return used | {share.pod: share.units for share in found.unplaced}
        assert {gpu.gpu: gpu.units - gpu.free for gpu in found.gpus} == used
        return used

    def used_by_metrics(self) -> Mapping[str, int]:
        page, namespace = self.metrics("node", 9410), self.node.namespace
        key = 'gpuvirt_shared_gpu_units_used{{gpu="{}",namespace="{}"}}'
        return {gpu: int(page.get(key.format(gpu, namespace), 0)) for gpu in self.gpus}

    def users(self) -> tuple[int, list[str]]:
        """Return how many GPUs are allocated by the GpuNode, and their users."""
        status = self.user.kubectl("get", "gpunode", settings.NODE, "-o", "jsonpath={.status}")
        found = msgspec.json.decode(status, type=GpuNodeStatus)
        return found.totals.allocated, [user for gpu in found.gpus for user in gpu.users]

    def begin_with(self, name: str) -> None:
        """Put the GPU of a pod first in the order of the test."""
        (gpu,) = self.printed(name).gpus
        self.gpus.sort(key=lambda each: each != gpu)

    def until_used(self, *units: int) -> None:
        """Wait until every view has these used units of the GPUs, in the order of the test."""
        desired = dict(zip(self.gpus, units, strict=True))

        def different() -> str:
            """Return the first view that differs: the records follow a pod first, and cost no process."""
            views = (self.used_by_records, self.used_by_metrics, self.used_by_shares)
            found = ((view.__name__, used) for view in views if (used := view()) != desired)
            return next((f"{name}: {used}" for name, used in found), "")

        self.node.until(lambda: not different(), lambda: f"expected {desired}, found {different()}")


@contextmanager
def sharing_lab(user: Install, node: LabNode) -> Iterator[SharingLab]:
    """Mount a host whose GPUs can be shared; remove all releases after it."""
    with node.simulated_host("vm-2xV100"), nvidias_toolkit(node) as gpus:
        try:
            yield SharingLab(user, node, gpus)
        finally:
            user.clear()
