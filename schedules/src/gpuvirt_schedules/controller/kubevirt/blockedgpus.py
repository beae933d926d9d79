"""The GPUs of a node that wait for users of their vGPUs, by its agent's newest report and a plan of that report."""

from collections.abc import Iterator

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.gpunode import READY, Gpu, GpuNode
from gpuvirt.model.allocation.launcherpods import user_text
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.workers.status import ConfiguredNode
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt.plans.nodeplan import GpuPlan, plan_node


class WaitingGpu(msgspec.Struct, frozen=True):
    """A GPU that waits for users of its vGPUs."""

    node: NodeName
    address: str
    users: tuple[str, ...]
    """Pods as `pod default/train-0`, and processes."""
    obstacles: tuple[str, ...] = ()
    """Why the GPU would keep its vGPUs even without these users."""


def waiting_gpus(node: ConfiguredNode, origin: str, gpu_node: GpuNode, configs: KnownConfigs) -> tuple[WaitingGpu, ...]:
    """Return the GPUs that wait for users; none unless both the report and its plan say so."""
    spec, status = gpu_node.spec, gpu_node.status
    if spec is None or status is None or not is_waiting(gpu_node, node.vgpu_config, origin):
        return ()
    if configs.has(node.vgpu_config) is not True:
        return ()
    source = Source(Origin.GPU_NODE, f"vgpuConfig of phase {node.phase}")
    plan = plan_node(gpu_node, spec.mode, ConfigName(node.vgpu_config, source), configs.configs)
    if plan.problem is not None or plan.unknown:
        return ()
    reported = {gpu.address: gpu for gpu in status.gpus}
    return tuple(
        WaitingGpu(node.node, gpu.address, tuple(_users(gpu, reported[gpu.address])), tuple(_obstacles(gpu)))
        for gpu in plan.gpus
        if gpu.in_the_way
    )


def is_waiting(gpu_node: GpuNode, config: str, origin: str) -> bool:
    """Return whether the agent has read the newest spec, which has this vGPU config, and waits for users of vGPUs."""
    spec, status = gpu_node.spec, gpu_node.status
    if spec is None or status is None or spec.origins is None:
        return False
    if spec.vgpu_config != config or spec.origins.vgpu_config != origin:
        return False
    if status.observed_generation < gpu_node.metadata.generation:
        return False
    ready = next((condition for condition in status.conditions if condition.type == READY), None)
    return ready is not None and ready.status == "False" and ready.reason == ReasonCode.VGPU_IN_USE


def _users(plan: GpuPlan, gpu: Gpu) -> Iterator[str]:
    """Yield the pods and processes that the plan names; VMs by their pods, whose owners are read."""
    users = dict.fromkeys((*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)))
    yield from (user for user in users if user_text(user) in plan.in_the_way)


def _obstacles(gpu: GpuPlan) -> Iterator[str]:
    if gpu.mode != Mode.VGPU:
        yield f"the GPU is in mode {gpu.mode}"
    yield from (text for text in gpu.reasons if not text.startswith(f"{ReasonCode.VGPU_IN_USE}:"))
