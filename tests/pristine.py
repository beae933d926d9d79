"""Remove everything that tests and their programs leave in a cluster, so that their order does not matter."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from lab.cluster.controlplane import ControlPlane

NFDS = "feature.node.kubernetes.io/"
NODES = "/api/v1/nodes"
KINDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class _Metadata(msgspec.Struct):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Status(msgspec.Struct):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}


class _Node(msgspec.Struct):
    metadata: _Metadata
    status: _Status


class _Nodes(msgspec.Struct):
    items: list[_Node]


class _Named(msgspec.Struct):
    metadata: _Metadata


class _Kinds(msgspec.Struct):
    items: list[_Named]


def clear(cluster: ControlPlane) -> None:
    """Delete all custom kinds with their objects, and all foreign keys of nodes."""
    if msgspec.json.decode(_listed(cluster, KINDS), type=_Kinds).items:
        done = cluster.kubectl("delete", "crd", "--all", "--wait=true", "--timeout=60s")
        assert done.returncode == 0, done.stderr
    for node in msgspec.json.decode(_listed(cluster, NODES), type=_Nodes).items:
        _clear_node(cluster, node)


def _clear_node(cluster: ControlPlane, node: _Node) -> None:
    """Remove labels, annotations, and counts of resources.

    A kubelet that restarts without its checkpoint leaves the previous counts in its Node forever (seen with 1.36.3), so
    a test would see the counts of an earlier test's device plugin.
    """
    found, counts = node.metadata, node.status
    _patch(cluster, found.name, "metadata", {"labels": _gone(found.labels), "annotations": _gone(found.annotations)})
    gone = {"capacity": _gone(_resources(counts.capacity)), "allocatable": _gone(_resources(counts.allocatable))}
    _patch(cluster, f"{found.name}/status", "status", gone)


def _resources(counts: Iterable[str]) -> Iterator[str]:
    return (name for name in counts if "/" in name)


def _gone(keys: Iterable[str]) -> dict[str, None]:
    return {key: None for key in keys if not key.rpartition("/")[0].endswith("kubernetes.io") or key.startswith(NFDS)}


def _patch(cluster: ControlPlane, path: str, part: str, changes: Mapping[str, Mapping[str, None]]) -> None:
    if any(changes.values()):
        cluster.api.patch(f"{NODES}/{path}", {part: changes})


def _listed(cluster: ControlPlane, path: str) -> bytes:
    found = cluster.api.get(path)
    assert found is not None, f"the API server does not know {path}"
    return found
