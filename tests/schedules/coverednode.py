"""A node of a schedule whose night has another vGPU config, and the report of its agent."""

import json
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuvirt.kube.kinds.clusterpolicy import CLUSTER_POLICIES
from gpuvirt.kube.kinds.gpunode import GPU_NODES, Spec
from tests.agent.node.nodewithvgpus import give_first_vgpu, reported
from tests.agent.node.simnode import running_node
from tests.controller.observedcluster import ALL_ON
from tests.schedules.scheduleday import SCHEDULE, Day
from tests.schedules.servedschedule import NODES, Object
from tests.sim.simulated import Simulated

POLICY, NODE = f"{CLUSTER_POLICIES.path}/cluster-policy", "bare01"
POOL = {"matchLabels": {"nvidia.com/pool": "vgpu"}}


def covered(night: str, *, config_map: str = "") -> Day:
    """Return a cluster with a node of a schedule, whose night has this vGPU config."""
    day = Day(())
    day.served.kinds |= {GPU_NODES.path, CLUSTER_POLICIES.path}
    manager: Object = {"enabled": True, "config": {"name": config_map}}
    day.served.put(POLICY, {"spec": {**ALL_ON, "vgpuDeviceManager": manager}})
    day.served.put(f"{NODES}/{NODE}", {"metadata": {"labels": {"nvidia.com/pool": "vgpu"}}})
    phases = [
        {"name": "day", "start": "0 7 * * *", "nodes": POOL, "vgpuConfig": "T4-8Q"},
        {"name": "night", "start": "0 20 * * *", "nodes": POOL, "vgpuConfig": night},
    ]
    day.served.put(SCHEDULE, {"metadata": {"generation": 1}, "spec": {"phases": phases}})
    return day


async def put_report(day: Day, simulated: Simulated, folder: Path, spec: Spec, **metadata: object) -> None:
    """Store the GpuNode of a node with four T4, of which the first carries two T4-8Q; a VM has one of them."""
    async with running_node(simulated("4xT4"), folder) as node:
        await give_first_vgpu(node)
        found = replace(reported(node), spec=spec)
    content: Object = json.loads(msgspec.json.encode(found))
    day.served.put(f"{GPU_NODES.path}/{NODE}", {**content, "metadata": metadata})
