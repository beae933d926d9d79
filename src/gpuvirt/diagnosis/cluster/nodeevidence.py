"""Reads the objects from the API server that `gpuvirt why node/NAME` decides from."""

import asyncio

from gpuvirt.diagnosis.cluster import states
from gpuvirt.diagnosis.cluster.phaseconfigs import read_phases
from gpuvirt.diagnosis.vms.nodeexplanation import NodeEvidence
from gpuvirt.diagnosis.vms.vmevidence import PodSeen
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import ENDED
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.kube.resources import NODES, Resource
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.workers.spec import CORDONED_BY
from gpuvirt.shares.awayworkers import away, read_schedules


def ask_node(credentials: Credentials, name: str, units: str) -> NodeEvidence:
    """Return the evidence about a node; raise ConfigError if it does not exist, ApiError."""
    return asyncio.run(_ask(Client(credentials), name, units))


async def _ask(client: Client, name: str, units: str) -> NodeEvidence:
    try:
        node = await client.get(NODES, name, core.Node)
    except NotFoundError as error:
        names = [found.metadata.name for found in (await client.list(Collection(NODES, core.AnyObject))).items]
        near = nearest(name, names)
        hint = f"did you mean node/{near}?" if near is not None else "expected a node (kubectl get nodes)"
        raise ConfigError(f"the cluster has no node {name}; {hint}", where="gpuvirt why") from error
    gpu_node, pods, schedules = await asyncio.gather(_gpu_node(client, name), _pods(client), _schedules(client))
    key = NodeName(name)
    label = node.metadata.labels.get(CORDONED_BY)
    found = away(schedules, {key: label} if label is not None else {})
    reports = {key: gpu_node} if gpu_node is not None else {}
    phases = await read_phases(client, schedules, {key: node.metadata.labels}, reports)
    return NodeEvidence(states.node_seen(node, gpu_node), pods, units, found.get(key), phases.get(key, ()))


async def _schedules(client: Client) -> tuple[VgpuSchedule, ...]:
    """Return the schedules; none for a user who may not list them, for whom the node's label counts alone."""
    try:
        return await read_schedules(client)
    except ForbiddenError:
        return ()


async def _gpu_node(client: Client, name: str) -> GpuNode | None:
    try:
        return await client.get(GPU_NODES, name, GpuNode)
    except NotFoundError:
        return None


async def _pods(client: Client) -> tuple[PodSeen, ...] | None:
    try:
        found = (await client.list(Collection(Resource("pods"), core.WholePod))).items
    except ForbiddenError:
        return None
    return tuple(states.pod_seen(pod) for pod in found if pod.status.phase not in ENDED)
