"""KubeVirt's VMs on nodes with GPUs of their own: what a round of a schedule reads of them, and its two writes."""

from collections.abc import Iterable

from gpuvirt.cluster.client import Client
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import ForbiddenError, NotFoundError
from gpuvirt.cluster.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.cluster.kinds.vgpuschedule import VgpuSchedule
from gpuvirt.cluster.operator.nodes.scheduled import origin_of
from gpuvirt.cluster.operator.schedules.kubevirt.blockedgpus import WaitingGpu, waiting_gpus
from gpuvirt.cluster.operator.schedules.kubevirt.connection import KubeVirtVms
from gpuvirt.cluster.operator.schedules.kubevirt.usingvms import VMI, Budget, LauncherPod, Read, seen_vms
from gpuvirt.cluster.operator.schedules.workerobjects import ALL_PODS
from gpuvirt.cluster.plans.knownconfigs import KnownConfigs
from gpuvirt.cluster.resources import Resource
from gpuvirt.model.schedules.hypervisor import Answer
from gpuvirt.model.schedules.nodevms import ChangeVm, NodeVm, SeenVms
from gpuvirt.model.schedules.status import ConfiguredNode

BUDGETS = Collection(Resource("poddisruptionbudgets", "policy"), Budget)


class NodeVms:
    """The VMs on the nodes of one schedule. `read` raises ApiError; errors of `change` are answers."""

    def __init__(self, client: Client, schedule: str) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`)."""
        self._client = client
        self._schedule = schedule

    async def read(
        self,
        waiting: Iterable[ConfiguredNode],
        known: Iterable[NodeVm],
        configs: KnownConfigs,
        schedules: Iterable[VgpuSchedule],
    ) -> SeenVms:
        """Return the users of GPUs of the nodes that wait, and the VMs that the status has.

        GpuNodes are read first, so that a pod that has ended since is none of the users.
        """
        gpus = [gpu for node in waiting for gpu in await self._gpus(node, configs)]
        pods = {pod.where: pod for name in sorted({gpu.node for gpu in gpus}) for pod in await self._pods(name)}
        launchers = {pod.metadata.namespace for pod in pods.values() if pod.metadata.controller_uid(VMI)}
        namespaces = sorted(launchers | {vm.namespace for vm in known})
        vms = {name: await KubeVirtVms(self._client, name).objects() for name in namespaces}
        places = [place for found in schedules if (place := found.spec.hypervisor.kube_virt) is not None]
        workers = frozenset(place.namespace for place in places)
        return seen_vms(Read(pods, vms, await self._budgets() if launchers else (), workers), gpus)

    async def change(self, change: ChangeVm) -> Answer:
        """Shut down or start a VM, if its state permits that."""
        return await KubeVirtVms(self._client, change.namespace).call(change.call)

    async def _gpus(self, node: ConfiguredNode, configs: KnownConfigs) -> tuple[WaitingGpu, ...]:
        try:
            gpu_node = await self._client.get(GPU_NODES, node.node, GpuNode)
        except NotFoundError:
            return ()
        return waiting_gpus(node, origin_of(self._schedule, node.phase), gpu_node, configs)

    async def _pods(self, node: str) -> tuple[LauncherPod, ...]:
        return tuple((await self._client.list(Collection(ALL_PODS, LauncherPod, on_node=node))).items)

    async def _budgets(self) -> tuple[Budget, ...] | None:
        try:
            return tuple((await self._client.list(BUDGETS)).items)
        except ForbiddenError:
            return None
