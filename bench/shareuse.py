"""Measures what shares with limits cost the agent: a container's start, and the reading of the memory of 64 of them.

.venv/bin/python -m bench.shareuse
"""

import asyncio
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter, process_time

from tests.agent.shares.limitednode import limited
from tests.agent.shares.memoryregions import region
from tests.agent.shares.sharednode import GPUS, SharedNode, shared_node

from bench.results import Results
from gpuvirt.agent.shares.memoryuse import read_use, read_uses
from gpuvirt.facts.ids import PodUid
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.paths import HostRoots

CONTAINERS, TIMES, STARTS = 64, 50, 300
LIMITS = (Enforcement.DRIVER, Enforcement.HAMI_CORE, Enforcement.NONE)


def main() -> None:
    """Measure, and print the table."""
    starts, use = asyncio.run(measure_starts()), measure_use()
    print(f"load {os.getloadavg()[1]:.1f}\n{starts.table(LIMITS)}\n\n{use.table(('gpuvirt',))}")


async def measure_starts() -> Results:
    """Measure PreStartContainer, whose answer a container waits for, with each limit in turn."""
    results = Results()
    async with AsyncExitStack() as stack:
        nodes = [await _node(stack, by) for by in LIMITS]
        pods = [await node.admit("p", 300, gpu=GPUS[0]) for node in nodes]
        took_s = dict[Enforcement, list[float]]({by: [] for by in LIMITS})
        for _ in range(STARTS):
            for by, node, pod in zip(LIMITS, nodes, pods, strict=True):
                (held,) = pod.held
                began_s = perf_counter()
                await node.kubelet.client(held.resource).pre_start(held.devices)
                took_s[by].append(perf_counter() - began_s)
    for by, each in took_s.items():
        results.add(by, "PreStartContainer, p50, ms", sorted(each)[STARTS // 2] * 1000)
        results.add(by, "... the first of a pod, ms", each[0] * 1000)
    return results


async def _node(stack: AsyncExitStack, by: Enforcement) -> SharedNode:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    node = await stack.enter_async_context(shared_node(folder))
    await limited(node, by)
    return node


def measure_use() -> Results:
    """Measure the reading of what HAMi-core counts."""
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        proc = Path(folder)
        for pid in range(CONTAINERS):
            inner = proc / f"{pid}/root/usr/local/gpuvirt/region"
            inner.mkdir(parents=True)
            (inner / "memory").write_bytes(region(*range(8)))
        took_s = []
        for _ in range(TIMES):
            began_s = perf_counter()
            for pid in range(CONTAINERS):
                read_use(proc, pid)
            took_s.append(perf_counter() - began_s)
        results.add("gpuvirt", f"the regions of {CONTAINERS} containers, p50, ms", sorted(took_s)[TIMES // 2] * 1000)
    processes = sum(path.name.isdigit() for path in Path("/proc").iterdir())
    pods = [PodUid(f"{number}a5c31f2-0000") for number in range(CONTAINERS)]
    kernel = RealKernel(HostRoots.under(Path("/")))
    began_s = process_time()
    for _ in range(TIMES):
        read_uses(kernel, Path("/proc"), pods)
    what = f"... their processes among {processes}, processor time, ms"
    results.add("gpuvirt", what, (process_time() - began_s) / TIMES * 1000)
    return results


if __name__ == "__main__":
    main()
