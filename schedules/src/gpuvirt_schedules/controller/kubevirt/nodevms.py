"""KubeVirt's VMs on nodes with GPUs of their own: what a round of a schedule reads of them, and its two writes.

Which VMs are the users of GPUs, and whether each may be stopped, is decided by their pods and VMIs. Source: KubeVirt's
pkg/virt-controller/services/template.go: the VMI controls the pod `virt-launcher`; watch/vm/vm.go: the VirtualMachine
controls the VMI.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gpuvirt.controller.nodes.resolve import origin_of
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds.core import OwnedMetadata, WholePod
from gpuvirt.kube.kinds.gpunode import GPU_NODES, READY, Gpu, GpuNode
from gpuvirt.kube.labels import LabelSelector
from gpuvirt.kube.resources import Collection, Resource
from gpuvirt.model.allocation.launcherpods import user_text
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.hypervisor import Answer, VmKey
from gpuvirt.model.workers.observed import BlockedGpu, ChangeVm, NodeVm, ObservedVm, ObservedVms
from gpuvirt.model.workers.status import ConfiguredNode
from gpuvirt.plans.knownconfigs import KnownConfigs
from gpuvirt.plans.nodeplan import GpuPlan, plan_node
from gpuvirt_schedules.controller.kubevirt import virtualmachines
from gpuvirt_schedules.controller.kubevirt.connection import KubeVirtVms, server_of
from gpuvirt_schedules.controller.kubevirt.virtualmachines import BY_STRATEGY, VM, VmObjects, controller_uid
from gpuvirt_schedules.controller.workerobjects import ALL_PODS


# The GPUs of a node that wait for users of their vGPUs, by its agent's newest report and a plan of that report.
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
        WaitingGpu(node.node, gpu.address, _users(gpu, reported[gpu.address]), tuple(_obstacles(gpu)))
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


def _users(plan: GpuPlan, gpu: Gpu) -> tuple[str, ...]:
    """Return the pods and processes that the plan names; VMs by their pods, whose owners are read."""
    users = dict.fromkeys((*gpu.users, *(user for vgpu in gpu.vgpus for user in vgpu.users)))
    return tuple(user for user in users if user_text(user) in plan.in_the_way)


def _obstacles(gpu: GpuPlan) -> Iterator[str]:
    if gpu.mode != Mode.VGPU:
        yield f"the GPU is in mode {gpu.mode}"
    yield from (text for text in gpu.reasons if not text.startswith(f"{ReasonCode.VGPU_IN_USE}:"))


POD, VMI = "pod ", "VirtualMachineInstance"


class _BudgetSpec(msgspec.Struct, frozen=True):
    selector: LabelSelector | None = None


class _BudgetStatus(msgspec.Struct, frozen=True, rename="camel"):
    disruptions_allowed: int = 0


class Budget(msgspec.Struct, frozen=True):
    """A PodDisruptionBudget."""

    metadata: OwnedMetadata
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()

    def covers(self, pod: WholePod) -> bool:
        """Return whether a disruption of a pod counts. A VMI's own budget forbids evictions, and no shutdown."""
        selector, is_own = self.spec.selector, bool(controller_uid(self.metadata, VMI))
        if is_own or selector is None or self.metadata.namespace != pod.metadata.namespace:
            return False
        return selector.matches(pod.metadata.labels)


class RoundReading(msgspec.Struct, frozen=True):
    """The pods, VMs, budgets and workers' namespaces that one round has read."""

    pods: Mapping[str, WholePod]
    """The pods of the nodes, by namespace and name."""
    vms: Mapping[str, Mapping[VmKey, VmObjects] | Reason]
    """The VMs of each namespace, or why they are unknown."""
    budgets: tuple[Budget, ...] | None
    """None if they may not be listed."""
    workers: frozenset[str] = frozenset()
    """The namespaces in which schedules have their workers."""


def observed_vms(read: RoundReading, gpus: Iterable[WaitingGpu]) -> ObservedVms:
    """Return the VMs of all namespaces, and for each GPU which of them are its users."""
    blocked, pods = list[BlockedGpu](), dict[VmKey, list[WholePod]]()
    for gpu in gpus:
        vms, others = list[VmKey](), list(gpu.obstacles)
        for user in gpu.users:
            pod = read.pods.get(user.removeprefix(POD)) if user.startswith(POD) else None
            found = _vm_of(pod, read) if pod is not None else user
            if isinstance(found, VmObjects) and pod is not None:
                key = VmKey(found.vm.metadata.uid)
                vms.append(key)
                pods.setdefault(key, []).append(pod)
            elif isinstance(found, str):
                others.append(found)
        blocked.append(BlockedGpu(gpu.node, gpu.address, tuple(dict.fromkeys(vms)), tuple(others)))
    objects = {key: vm for found in read.vms.values() if not isinstance(found, Reason) for key, vm in found.items()}
    observed = {key: _observed(vm, pods.get(key, ()), read) for key, vm in objects.items()}
    unknown = {name: found for name, found in read.vms.items() if isinstance(found, Reason)}
    return ObservedVms(observed, unknown, tuple(blocked))


def _vm_of(pod: WholePod, read: RoundReading) -> VmObjects | str:
    """Return the VM that a pod runs; in words what else it is."""
    vmi = controller_uid(pod.metadata, VMI)
    if not vmi:
        return f"{POD}{pod.where}"
    found = read.vms.get(pod.metadata.namespace)
    if isinstance(found, Reason):
        return f"{POD}{pod.where}, whose VM is not known: {found.text}"
    for objects in (found or {}).values():
        metadata = objects.vmi.metadata if objects.vmi is not None else None
        if metadata is not None and metadata.uid == vmi and controller_uid(metadata, VM) == objects.vm.metadata.uid:
            return objects
    return f"{POD}{pod.where}, whose VMI belongs to no VirtualMachine"


def _observed(objects: VmObjects, pods: Iterable[WholePod], read: RoundReading) -> ObservedVm:
    vm = objects.vm
    covering = [budget for budget in read.budgets or () if any(budget.covers(pod) for pod in pods)]
    off = VmObjects(vm, None)
    is_kept_running = vm.spec.strategy in BY_STRATEGY and objects.is_on
    return ObservedVm(
        VmKey(vm.metadata.uid),
        vm.metadata.namespace,
        vm.metadata.name,
        objects.is_on,
        virtualmachines.is_changing(objects),
        vm.spec.strategy == "Halted",
        next(_refusals(objects, read), None),
        # A schedule halts a VM of these strategies, and starts it again by them.
        None if is_kept_running else virtualmachines.start_refusal(server_of(vm.metadata.namespace), off),
        {f"{found.metadata.namespace}/{found.metadata.name}": found.status.disruptions_allowed for found in covering},
        objects.instance,
    )


def _refusals(objects: VmObjects, read: RoundReading) -> Iterator[Reason]:
    """Yield why a VM must not be stopped."""
    metadata = objects.vm.metadata
    where = f"{metadata.namespace}/{metadata.name}"
    if metadata.namespace in read.workers:
        yield reasons.vm_not_stopped(where, "its namespace has the workers of a schedule, whose pods would end with it")
    if metadata.controller is not None:
        yield reasons.vm_not_stopped(where, f"a {metadata.controller.kind} controls it")
    if read.budgets is None:
        yield reasons.vm_not_stopped(where, "PodDisruptionBudgets may not be listed, so none is known to allow it")
    refusal = virtualmachines.shutdown_refusal(server_of(metadata.namespace), objects)
    if refusal is not None:
        yield reasons.vm_not_stopped(where, refusal.text)


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
        workers: frozenset[str],
    ) -> ObservedVms:
        """Return the users of GPUs of the nodes that wait, and the VMs that the status has.

        `workers` has the namespaces in which schedules have their workers.

        GpuNodes are read first, so that a pod that has ended since is none of the users.
        """
        gpus = [gpu for node in waiting for gpu in await self._gpus(node, configs)]
        pods = {
            pod.where: pod
            for name in sorted({gpu.node for gpu in gpus})
            for pod in (await self._client.list(Collection(ALL_PODS, WholePod, on_node=name))).items
        }
        launchers = {pod.metadata.namespace for pod in pods.values() if controller_uid(pod.metadata, VMI)}
        namespaces = sorted(launchers | {vm.namespace for vm in known})
        vms = {name: await KubeVirtVms(self._client, name).objects() for name in namespaces}
        return observed_vms(RoundReading(pods, vms, await self._budgets() if launchers else (), workers), gpus)

    async def change(self, change: ChangeVm) -> Answer:
        """Shut down or start a VM, if its state permits that."""
        return await KubeVirtVms(self._client, change.namespace).call(change.call)

    async def _gpus(self, node: ConfiguredNode, configs: KnownConfigs) -> tuple[WaitingGpu, ...]:
        try:
            gpu_node = await self._client.get(GPU_NODES, node.node, GpuNode)
        except NotFoundError:
            return ()
        return waiting_gpus(node, origin_of(self._schedule, node.phase), gpu_node, configs)

    async def _budgets(self) -> tuple[Budget, ...] | None:
        try:
            return tuple((await self._client.list(BUDGETS)).items)
        except ForbiddenError:
            return None
