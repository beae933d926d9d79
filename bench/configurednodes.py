"""Measures what a VgpuSchedule with vGPU configs for 1,000 nodes costs the controller at each change of a GpuNode.

.venv/bin/python -m bench.configurednodes
"""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from time import process_time

import msgspec
from tests.schedules.configcluster import SPEC
from tests.schedules.configuredpool import gpu_node, node, stored

from bench.results import Results
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.objects import ObjectKey
from gpuvirt_schedules.controller.configurednodes import ConfiguredNodes
from gpuvirt_schedules.controller.objects import schedule_of, status_of

NODES, TIMES = 1000, 50
NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)


def cost_ms(run: Callable[[], object]) -> float:
    """Return the processor time of a call, in milliseconds."""
    run()
    began_s = process_time()
    for _ in range(TIMES):
        run()
    return (process_time() - began_s) / TIMES * 1000


def main() -> None:
    """Measure, and print the table."""
    keys = [ObjectKey("", f"n{number:04}") for number in range(NODES)]
    nodes = {key: node(key.name, "vgpu") for key in keys}
    gpu_nodes = {key: gpu_node(key.name, "A10-4Q", "True") for key in keys}
    configured = ConfiguredNodes()
    configured.observe_nodes(Delta(nodes))
    configured.observe_gpu_nodes(Delta(gpu_nodes))
    schedule, _ = schedule_of(stored(SPEC))
    found = configured.of(stored(SPEC), schedule, NOON) or ()
    rows = [{"node": row.node, "phase": "day", "vgpuConfig": row.vgpu_config, "applied": True} for row in found]
    reported = stored(SPEC, nodes=rows)

    def first() -> None:
        configured.forget("gpus")
        configured.of(reported, schedule, NOON)

    def one_changed() -> None:
        configured.observe_gpu_nodes(Delta(gpu_nodes, frozenset({keys[7]})))
        configured.of(reported, schedule, NOON)

    results = Results()
    results.add("gpuvirt", f"{NODES} nodes of a phase, ms: all are decided", cost_ms(first))
    results.add("gpuvirt", "... one GpuNode has changed", cost_ms(one_changed))
    results.add("gpuvirt", "... none has", cost_ms(lambda: configured.of(reported, schedule, NOON)))
    results.add("gpuvirt", "... the status is read, once after each write", cost_ms(lambda: status_of(reported)))
    results.add("gpuvirt", "... JSON of the status, KiB", len(msgspec.json.encode(reported.status)) / 1024)
    print(f"load {os.getloadavg()[1]:.1f}\n{results.table(('gpuvirt',))}")


if __name__ == "__main__":
    main()
