"""Nodes with shared GPUs that are objects alone, and the pods on them, in a cluster with a real kube-scheduler."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import yaml
from lab.cluster.controlplane import ControlPlane

from gpuvirt.model.shares.annotations import SHARED_GPUS_ANNOTATION, SHARES_ANNOTATION, PodShares
from gpuvirt.model.shares.demand import units_of
from gpuvirt.model.shares.sharedgpus import SCHEDULER, UNITS_RESOURCE
from gpuvirt.shares.objects import SharingPod
from tests.cluster.labnamespace import BOX, PATIENCE_S

LABEL = "gpuvirt.io/share-test"
"""Of the nodes for the pods of tests."""


class _Pods(msgspec.Struct):
    items: list[SharingPod]


@dataclass
class ShareNodes:
    """Nodes, and the pods of the namespace `default`."""

    cluster: ControlPlane
    capacity: dict[str, dict[str, int]] = field(default_factory=dict, init=False)
    """The units of each GPU of each node that was ever there."""
    adopted: list[str] = field(default_factory=list, init=False)

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = self.cluster.kubectl(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects: Mapping[str, object]) -> None:
        self.kubectl("apply", "--server-side", "-f", "-", given=yaml.safe_dump_all(objects))

    def make_nodes(self, count: int, gpus: int = 2, units: int = 1000) -> Sequence[str]:
        """Create nodes, each with some GPUs, and return their names."""
        names = [f"share{number:02}" for number in range(count)]
        self.capacity |= {name: {f"GPU-{name}-{gpu}": units for gpu in range(gpus)} for name in names}
        self.apply(*(self._node(name) for name in names))
        amounts = {"cpu": "64", "memory": "64Gi", "pods": "110", UNITS_RESOURCE: str(gpus * units)}
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "an object alone"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        for name in names:
            self.cluster.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
        return names

    def _node(self, name: str) -> Mapping[str, object]:
        annotations = {SHARED_GPUS_ANNOTATION: json.dumps(self.capacity[name])}
        metadata = {"name": name, "annotations": annotations, "labels": {LABEL: "true"}}
        return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}

    def adopt(self, name: str, capacity: dict[str, int]) -> None:
        """Use a node with a kubelet, too; `clear` keeps it."""
        self.capacity[name] = capacity
        self.adopted.append(name)
        self.kubectl("label", "node", name, f"{LABEL}=true")

    def deploy(self, name: str, replicas: int, units: int, priority: str = "", script: str = "") -> None:
        """Create a Deployment of pods, each with some units; without a script they can run nowhere."""
        runs = {"image": BOX, "imagePullPolicy": "Never", "args": [script]} if script else {"image": "none"}
        spec = {
            "schedulerName": SCHEDULER,
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {LABEL: "true"},
            "containers": [{"name": "main", **runs, "resources": {"limits": {UNITS_RESOURCE: str(units)}}}],
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

    def gpus_of(self, pod: SharingPod) -> Sequence[str]:
        """Return the GPUs of a pod by its annotation."""
        shares = msgspec.json.decode(pod.metadata.annotations[SHARES_ANNOTATION], type=PodShares).containers
        return sorted({gpu for given in shares.values() for gpu in given})

    def assert_not_overcommitted(self) -> None:
        """Check by the API's pods alone that no GPU has more than its units, and that each pod has what it requests."""
        taken: Counter[tuple[str, str]] = Counter()
        for pod in self.pods():
            if not pod.spec.node_name:
                continue
            shares = msgspec.json.decode(pod.metadata.annotations[SHARES_ANNOTATION], type=PodShares).containers
            for container in pod.spec.containers:
                assert sum(shares[container.name].values()) == units_of(container.resources.requests[UNITS_RESOURCE])
            for given in shares.values():
                taken.update({(pod.spec.node_name, gpu): units for gpu, units in given.items()})
        over = {key: units for key, units in taken.items() if units > self.capacity[key[0]].get(key[1], 0)}
        assert over == {}

    def clear(self) -> None:
        """Delete the nodes and the pods, and return when they are gone.

        A Deployment goes after its pods: its ReplicaSet would create them again, for the next test.
        """
        for name in self.adopted:
            self.cluster.kubectl("label", "node", name, f"{LABEL}-")
        self.cluster.kubectl("delete", "deployments", "--all", "--cascade=foreground", "--namespace", "default")
        deadline_s = time.monotonic() + PATIENCE_S  # noqa: TID251  other programs' time
        while self.pods():
            assert time.monotonic() < deadline_s, [pod.where for pod in self.pods()]  # noqa: TID251
            self.cluster.kubectl("delete", "pods", "--all", "--force", "--namespace", "default")
        self.cluster.kubectl("delete", "nodes", "-l", f"{LABEL}=true")


@contextmanager
def share_nodes(cluster: ControlPlane) -> Iterator[ShareNodes]:
    """Give a cluster nodes that are objects alone for the duration of the context."""
    nodes = ShareNodes(cluster)
    try:
        yield nodes
    finally:
        nodes.clear()
