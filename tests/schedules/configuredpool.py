"""A schedule with vGPU configs, and nodes of its pool, as the API server has them."""

from collections.abc import Mapping

import msgspec

from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.kube.kinds.core import ReadNode
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.resources import Metadata


def stored(spec: Mapping[str, object], **status: object) -> VgpuSchedule:
    """Return a schedule as the API server has it."""
    metadata = {"name": "gpus", "namespace": "gpuvirt", "generation": 1}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": status}, VgpuSchedule)


def node(name: str, pool: str) -> ReadNode:
    """Return a node in a pool."""
    return ReadNode(Metadata(name, labels={"nvidia.com/pool": pool}))


def gpu_node(name: str, config: str, ready: str) -> OwnedGpuNode:
    """Return the GpuNode of a node with a vGPU config of the schedule."""
    at = "2026-01-05T00:00:00Z"
    phase = "day" if config == "A10-4Q" else "night"
    origins = {"vgpuConfig": f"VgpuSchedule gpus phase {phase}"}
    condition = {"type": "Ready", "status": ready, "reason": "VgpuInUse", "message": "", "lastTransitionTime": at}
    content: Mapping[str, object] = {
        "metadata": {"name": name, "generation": 1},
        "spec": {"mode": "vgpu", "vgpuConfig": config, "origins": origins},
        "status": {"observedGeneration": 1, "conditions": [condition]},
    }
    return msgspec.convert(content, OwnedGpuNode)
