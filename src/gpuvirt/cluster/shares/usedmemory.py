"""Reads what pods with limits use of their GPUs' memory, from the GpuNodes that their nodes' agents write."""

from collections.abc import Mapping

import msgspec

from gpuvirt.cluster.client import Client
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import ForbiddenError, NotFoundError
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, PodMemory
from gpuvirt.cluster.resources import Metadata


class _Shares(msgspec.Struct, frozen=True):
    memory: tuple[PodMemory, ...] = ()


class _Status(msgspec.Struct, frozen=True):
    shares: _Shares | None = None


class GpuNodeWithMemory(msgspec.Struct, frozen=True):
    """The fields of a GpuNode that have the memory of pods."""

    metadata: Metadata
    status: _Status | None = None


async def read_memory(client: Client) -> Mapping[str, PodMemory]:
    """Return the memory of pods by their names: `research/train-0`; raises ApiError.

    There is none for a user who may not list GpuNodes, and in a cluster without the kind.
    """
    try:
        nodes = (await client.list(Collection(GPU_NODES, GpuNodeWithMemory))).items
    except (ForbiddenError, NotFoundError):
        return {}
    reported = (node.status.shares for node in nodes if node.status is not None and node.status.shares is not None)
    return {f"{pod.namespace}/{pod.pod}": pod for shares in reported for pod in shares.memory}
