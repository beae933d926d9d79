"""What tests, and the programs that they run, leave in the lab's cluster: taken away, whatever the order of tests."""

import json
from collections.abc import Iterable, Iterator

import msgspec
from lab.cluster.cluster import Cluster

NFDS = "feature.node.kubernetes.io/"


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


def clear(cluster: Cluster) -> None:
    """Take away all kinds that are not Kubernetes' own, with their objects, and from all nodes what is not."""
    _kubectl(cluster, "delete", "crd", "--all", "--wait=true", "--timeout=60s")
    for node in msgspec.json.decode(_kubectl(cluster, "get", "nodes", "-o", "json"), type=_Nodes).items:
        _clear_node(cluster, node)


def _clear_node(cluster: Cluster, node: _Node) -> None:
    """Take away labels, annotations, and counts of resources.

    A kubelet that is started again without its checkpoint leaves the counts of before in its Node for ever (seen with
    1.36.3), so a test would see what an earlier one's device plugin has offered.
    """
    found, counts = node.metadata, node.status
    metadata = {"labels": _gone(found.labels), "annotations": _gone(found.annotations)}
    _patch(cluster, found.name, {"metadata": metadata})
    status = {"capacity": _gone(_resources(counts.capacity)), "allocatable": _gone(_resources(counts.allocatable))}
    _patch(cluster, found.name, {"status": status}, "--subresource=status")


def _resources(counts: Iterable[str]) -> Iterator[str]:
    return (name for name in counts if "/" in name)


def _gone(keys: Iterable[str]) -> dict[str, None]:
    return {key: None for key in keys if not key.rpartition("/")[0].endswith("kubernetes.io") or key.startswith(NFDS)}


def _patch(cluster: Cluster, node: str, patch: object, *options: str) -> None:
    _kubectl(cluster, "patch", "node", node, "--type=merge", "-p", json.dumps(patch), *options)


def _kubectl(cluster: Cluster, *arguments: str) -> str:
    done = cluster.kubectl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
