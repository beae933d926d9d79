"""Nodes and pods on a real API server, each in the spelling of several extenders, so that all count the same load."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.dialects import UNITS, Dialect, Place, Spelling
from bench.simulatedapi import labels as labels_of
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.resources import NODES, pods
from gpuvirt.shares.objects import SharingNode, SharingPod

GPUS = 8
AT_ONCE = 16
ALLOCATED = "pod-"
"""How the names of pods begin that have a GPU from the start."""
Object = Mapping[str, object]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The nodes, and the pods that are not bound."""

    nodes: Sequence[str]
    asked: Mapping[str, Mapping[str, str]]
    """The UIDs of the pods without a node, by dialect and name."""


async def load(
    kubeconfig: Path, dialects: Sequence[Dialect], nodes: int, allocated: int, asked: Sequence[int]
) -> Loaded:
    """Create nodes with eight GPUs, pods that have half of the GPUs, and pods without a node for each dialect.

    `asked` has the units of each pod without a node.
    """
    client = Client(from_kubeconfig(kubeconfig))
    collection = pods("default")
    names = [f"gpu-node-{number:05}" for number in range(nodes)]
    uids: dict[str, dict[str, str]] = {dialect.name: {} for dialect in dialects}

    async def make_pod(content: Object) -> SharingPod:
        return await client.create(collection, content, SharingPod)

    async def make_asked(what: tuple[Dialect, int, int]) -> None:
        dialect, number, units = what
        name = f"asked-{dialect.name}-{number:04}"
        uids[dialect.name][name] = (await make_pod(pod_of([dialect], name, units))).metadata.uid

    try:
        await _each(lambda name: client.create(NODES, node_of(dialects, name), SharingNode), names)
        await _each(make_pod, allocated_pods(dialects, names, allocated))
        await _each(make_asked, ((dialect, *numbered) for dialect in dialects for numbered in enumerate(asked)))
    finally:
        client.close()
    return Loaded(names, {name: dict(sorted(found.items())) for name, found in uids.items()})


async def _each(act: Callable[[T], Awaitable[object]], items: Iterable[T]) -> None:
    left = iter(items)

    async def act_in_turn() -> None:
        for item in left:
            await act(item)

    await asyncio.gather(*(act_in_turn() for _ in range(AT_ONCE)))


def node_of(dialects: Iterable[Dialect], name: str) -> Object:
    """Return a node with GPUs in each dialect."""
    spelled = _together(dialect.node(name, GPUS) for dialect in dialects)
    amounts = {"cpu": "64", "memory": "64Gi", "pods": "110", **spelled.amounts}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "an object alone"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": spelled.annotations},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def pod_of(
    dialects: Iterable[Dialect],
    name: str,
    units: int,
    place: Place | None = None,
    labels: Mapping[str, str] | None = None,
) -> Object:
    """Return a pod in each dialect; with a place, it has this GPU."""
    spelled = _together(dialect.pod(units, place) for dialect in dialects)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": spelled.annotations, "labels": labels},
        "spec": {
            "schedulerName": "nobody",
            "containers": [{"name": "main", "image": "none", "resources": {"limits": spelled.amounts}}],
            **({"nodeName": place.node} if place else {}),
        },
    }


def allocated_pods(dialects: Sequence[Dialect], nodes: Sequence[str], count: int) -> Iterable[Object]:
    """Yield pods that have half of the GPUs of each node, as evenly as their number allows."""
    places = [Place(name, gpu) for gpu in range(GPUS) for number, name in enumerate(nodes) if (number + gpu) % 2]
    units = max(UNITS // max(-(-count // len(places)), 1), 1)
    for number in range(count):
        yield pod_of(dialects, f"{ALLOCATED}{number:05}", units, places[number % len(places)], labels_of(number))


def _together(spellings: Iterable[Spelling]) -> Spelling:
    amounts: dict[str, str] = {}
    annotations: dict[str, str] = {}
    for spelling in spellings:
        amounts |= spelling.amounts
        annotations |= spelling.annotations
    return Spelling(amounts, annotations)
