"""A namespace of a cluster for one test: its objects, and the cluster's node as the API server has it."""

import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from lab.cluster import settings
from lab.cluster.controlplane import ControlPlane

from gpuvirt.model.shares.demand import units_of

PATIENCE_S = 180.0
"""Nothing that is waited for takes so long, unless it does not happen."""
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 0.1, 1.0
GPUVIRT = [sys.executable, "-m", "gpuvirt"]
BOX = "docker.io/local/box:1"
_NUMBERS = itertools.count(1)


class ContainerEnd(msgspec.Struct):
    """How a container ended, or why it did not start."""

    exitCode: int = 0  # noqa: N815  Kubernetes' spelling
    reason: str = ""
    message: str = ""


class ContainerState(msgspec.Struct, frozen=True):
    """Fields of a container's state that a failed test shows."""

    waiting: ContainerEnd | None = None
    terminated: ContainerEnd | None = None


class ContainerStatus(msgspec.Struct):
    """Fields of a container's status that tests read."""

    name: str
    ready: bool = False
    restartCount: int = 0  # noqa: N815  Kubernetes' spelling
    state: ContainerState = ContainerState()


class PodStatus(msgspec.Struct):
    """Fields of a pod's status that tests read."""

    phase: str = ""
    reason: str = ""
    message: str = ""
    initContainerStatuses: tuple[ContainerStatus, ...] = ()  # noqa: N815  Kubernetes' spelling
    containerStatuses: tuple[ContainerStatus, ...] = ()  # noqa: N815


class Pod(msgspec.Struct):
    """Fields of a pod that tests read."""

    status: PodStatus


class NodeStatus(msgspec.Struct):
    """Fields of a node's status that tests read."""

    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}


class NodeMetadata(msgspec.Struct):
    """Fields of a node's metadata that tests read."""

    labels: dict[str, str] = {}


class Node(msgspec.Struct):
    """Fields of a Node that tests read."""

    metadata: NodeMetadata
    status: NodeStatus


class LabNamespace:
    """The namespace, in a cluster with a real node or with one that is an object alone."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self._cluster = cluster
        self.namespace = namespace

    @property
    def cluster(self) -> ControlPlane:
        """The cluster that has the namespace."""
        return self._cluster

    def status(self, name: str) -> PodStatus:
        """Return a pod's status."""
        found = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods/{name}")
        assert found is not None, f"there is no pod {name}"
        return msgspec.json.decode(found, type=Pod).status

    def delete(self, name: str) -> None:
        """Delete a pod, and wait until it is gone."""
        self.kubectl("delete", "pod", name, "--grace-period=0", "--force", "--wait=true")

    def apply(self, manifest: Mapping[str, object]) -> None:
        """Apply a manifest."""
        done = self.cluster.kubectl("apply", "-f", "-", given=json.dumps(manifest))
        assert done.returncode == 0, done.stderr

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl in the test's namespace."""
        done = self.cluster.kubectl("--namespace", self.namespace, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def allocatable(self, resource: str) -> int:
        """Return the allocatable count of a resource in the Node's status."""
        return units_of(self.node().status.allocatable.get(resource, "0"))  # 2000 may be `2k`

    def node(self) -> Node:
        """Return the node as the API server has it."""
        found = self.cluster.api.get(f"/api/v1/nodes/{settings.NODE}")
        assert found is not None, "there is no node"
        return msgspec.json.decode(found, type=Node)

    def until(self, met: Callable[[], bool], seen: Callable[[], str]) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + PATIENCE_S  # noqa: TID251  other programs' time
        asked = time.monotonic()  # noqa: TID251
        while not met():
            now = time.monotonic()  # noqa: TID251
            assert now < deadline, seen()
            # A condition may cost a process: it leaves what is waited for half of the CPU time.
            time.sleep(min(max(LOOK_EVERY_S, now - asked), LOOK_AT_LEAST_EVERY_S))  # noqa: TID251
            asked = time.monotonic()  # noqa: TID251

    @contextmanager
    def existing(self) -> Iterator[None]:
        """Create the namespace for the duration of the context."""
        cluster, name = self.cluster, self.namespace
        assert cluster.kubectl("create", "namespace", name).returncode == 0
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"  # without it, pods are forbidden
        self.until(lambda: cluster.api.get(account) is not None, lambda: "no service account")
        try:
            yield
        finally:
            cluster.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=0", "--force")
            cluster.kubectl("delete", "namespace", name, "--wait=false")


def namespace_of(test: str) -> str:
    """Return a new name of a namespace for a test."""
    name = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_"))[:40].strip("-")
    return f"{name}-{next(_NUMBERS)}"
