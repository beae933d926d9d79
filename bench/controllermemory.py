"""Measures the memory that the controller needs for the nodes and GpuNodes of a cluster, in the usual size of both.

Each object is decoded from the event of a watch, as in the controller, which then keeps it. The memory is the growth of
the process's PSS, so that the interpreter and the program do not count.

    .venv/bin/python -m bench.controllermemory --nodes 5000
"""

import argparse
import gc
import json
import multiprocessing
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.clusternodes import Json, node, reported_gpu_node
from gpuvirt import nulls
from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.resources import KubernetesObject
from gpuvirt.kube.watchevents import EventType
from gpuvirt.model.desired.workload import Workload

AT = datetime(2026, 1, 1, tzinfo=UTC)
T = TypeVar("T", bound=KubernetesObject)
Made = Callable[[int], Json]


class _Event(msgspec.Struct):
    type: EventType
    object: msgspec.Raw


def cluster_node(number: int) -> Json:
    """Return a node for VMs with vGPUs."""
    return node(number, Workload.VGPU, AT)


KINDS: tuple[tuple[str, Made, type[KubernetesObject]], ...] = (
    ("nodes", cluster_node, ReadNode),
    ("GpuNodes", reported_gpu_node, OwnedGpuNode),
)


def read(content: Json, shape: type[T]) -> T:
    """Return an object as the controller decodes it from the event of a watch."""
    line = json.dumps({"type": "ADDED", "object": content}).encode()
    return nulls.decode(nulls.decode(line, _Event).object, shape)


def pss_kib() -> int:
    """Return the PSS of this process."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def growth_kib(kind: int, nodes: int) -> int:
    """Return the memory that the objects of a kind take."""
    _, made, shape = KINDS[kind]
    read(made(0), shape)
    before = pss_kib()
    kept = [read(made(number), shape) for number in range(nodes)]
    grown = pss_kib() - before
    return grown if kept else 0


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(prog="python -m bench.controllermemory", description=__doc__)
    parser.add_argument("--nodes", type=int, default=5_000, help="number of nodes")
    nodes = parser.parse_args().nodes
    for number, (name, made, _) in enumerate(KINDS):
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # nothing of one kind counts for the next
            grown = pool.apply(growth_kib, (number, nodes))
        size = len(json.dumps(made(1)))
        print(f"{nodes:,} {name} of {size / 1000:.1f} kB of JSON: {grown / 1024:.1f} MiB, {grown / nodes:.1f} KiB each")


if __name__ == "__main__":
    main()
