"""Reads what `gpuvirt why` decides from about a VM, a pod or a node, and KubeVirt's configuration."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from gpuvirt.diagnosis.evidence import ClusterNode
from gpuvirt.diagnosis.sharesreading import listed_schedules, read_index, shares_for_pod, shares_of_pods
from gpuvirt.diagnosis.vms import vmevidence
from gpuvirt.diagnosis.vms.podclaims import ClaimSeen, claim_seen, claimers
from gpuvirt.diagnosis.vms.vmevidence import ObjectKind, ObjectRef, PodSeen, VmEvidence
from gpuvirt.diagnosis.vms.vmexplanation import NodeEvidence
from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.events import EVENTS, SeenEvent, newest
from gpuvirt.kube.failures import ForbiddenError, NotFoundError
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import ENDED
from gpuvirt.kube.kinds.gpunode import GPU_NODES, GpuNode
from gpuvirt.kube.kinds.kubevirt import (
    CLUSTER_INSTANCETYPES,
    INSTANCETYPES,
    KUBEVIRTS,
    Devices,
    Instancetype,
    Vm,
    Vmi,
)
from gpuvirt.kube.kinds.resourceclaims import ALL_CLAIMS, WholeClaim, resource_claims
from gpuvirt.kube.kinds.vgpuschedule import VALID, VgpuSchedule
from gpuvirt.kube.resources import NODES, Collection, KubernetesObject, Resource, pods
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.inventory.nearness import nearest
from gpuvirt.model.kubevirt.kubevirt import KubeVirt, parse
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.shares.annotations import InvalidAnnotationError
from gpuvirt.model.shares.demand import InvalidQuantityError, UnplaceableError
from gpuvirt.model.workers.away import NodePhase, PhaseConfig, ScheduledNode, node_phases
from gpuvirt.model.workers.spec import CORDONED_BY, PhaseName
from gpuvirt.plans.knownconfigs import KnownConfigs, read_known_configs
from gpuvirt.plans.nodeplan import types_of
from gpuvirt.shares.awayworkers import away, local_time, read_schedules, stopped_by
from gpuvirt.shares.confinement import (
    RUNTIME_CLASSES,
    ConfinedPod,
    RuntimeClass,
    handlers_of,
    meaningless,
    why_unconfined,
)
from gpuvirt.shares.index import Index
from gpuvirt.shares.objects import demand_of_pod, needs_limits
from gpuvirt.shares.sharing import Sharing

T = TypeVar("T", bound=KubernetesObject)
Labels = Mapping[NodeName, Mapping[str, str]]

RESOURCES = {
    ObjectKind.VM: Resource("virtualmachines", "kubevirt.io"),
    ObjectKind.VMI: Resource("virtualmachineinstances", "kubevirt.io"),
    ObjectKind.POD: Resource("pods"),
    ObjectKind.CLAIM: ALL_CLAIMS.resource,
}
VIRTUAL = frozenset({ObjectKind.VM, ObjectKind.VMI})
"""The kinds of KubeVirt."""
SCHEDULABLE = "kubevirt.io/schedulable"
"""The label by which KubeVirt schedules VMs on a node."""
LAUNCHERS = f"{vmevidence.LAUNCHER_LABEL}={vmevidence.LAUNCHER}"


NOT_PREPARED = "FailedPrepareDynamicResources"
"""The kubelet's event of a pod whose claim a driver does not prepare."""
FAILURES = frozenset({"FailedCreatePodSandBox", "Failed", NOT_PREPARED})
"""The kubelet's events of a pod without a sandbox or its claims, and of a container that does not start."""


def ask(credentials: Credentials, target: ObjectRef, sharing: Sharing | None = None) -> VmEvidence:
    """Return the evidence about a VM, VMI or pod, with the errors of objects that may not be read; raise ApiError.

    `sharing`: how the cluster shares GPUs; by default as the extender does.
    """
    return asyncio.run(_VmReader(Client(credentials), target, sharing or Sharing()).ask())


def ask_cluster(kubeconfig: Path, context: str = "") -> tuple[tuple[KubeVirt, ...], tuple[ClusterNode, ...] | None]:
    """Return the KubeVirts of a cluster, none if KubeVirt is not installed, and the nodes on which it runs VMs.

    The nodes are None if they may not be listed. Raise ConfigError, ApiError.
    """
    client = Client(from_kubeconfig(kubeconfig, context))
    return asyncio.run(_read_cluster(client, f"{KUBEVIRTS.path} of the cluster in {kubeconfig}"))


async def _read_cluster(client: Client, where: str) -> tuple[tuple[KubeVirt, ...], tuple[ClusterNode, ...] | None]:
    kubevirts = await _read_kubevirts(client, where)
    try:
        nodes = (await client.list(Collection(NODES, core.Node, labelled=f"{SCHEDULABLE}=true"))).items
    except ForbiddenError:
        return kubevirts, None
    return kubevirts, tuple(vmevidence.cluster_node(node) for node in nodes)


async def _read_kubevirts(client: Client, where: str) -> tuple[KubeVirt, ...]:
    try:
        return parse(await client.read(KUBEVIRTS), where=where)
    except NotFoundError:
        return ()


class _VmReader:
    """Reads the evidence about one VM, VMI or pod."""

    def __init__(self, client: Client, target: ObjectRef, sharing: Sharing) -> None:
        self._client = client
        self._target = target
        self._sharing = sharing
        self._unread: list[str] = []

    async def ask(self) -> VmEvidence:
        evidence = await self._own_objects()
        evidence = await (self._with_cluster(evidence) if evidence.found else self._with_neighbours(evidence))
        return replace(evidence, unread=tuple(dict.fromkeys(self._unread)))

    async def _own_objects(self) -> VmEvidence:
        """Return the evidence with the target, and with the VMI and the pod of a VM alone."""
        target, vm, instancetype = self._target, None, Devices()
        if target.kind is ObjectKind.POD:
            pod = await self._get(ObjectKind.POD, target.name, core.WholePod)
            return VmEvidence(target=target, pod=vmevidence.pod_seen(pod) if pod is not None else None)
        if target.kind is ObjectKind.CLAIM:
            return await self._claim()
        if target.kind is ObjectKind.VM:
            vm = await self._get(ObjectKind.VM, target.name, Vm)
            if vm is None:
                return VmEvidence(target=target)
            instancetype = await self._instancetype(vm)
        vmi = await self._get(ObjectKind.VMI, target.name, Vmi)
        pods = await self._list(self._within(ObjectKind.POD), core.WholePod, LAUNCHERS)
        launcher = vmevidence.launcher_of(pods or (), target.name, vmi)
        return VmEvidence(
            target=target,
            vm=vm,
            instancetype=instancetype,
            vmi=vmi,
            pod=vmevidence.pod_seen(launcher) if launcher is not None else None,
            pod_unread=pods is None,
        )

    async def _claim(self) -> VmEvidence:
        """Return the evidence about a claim, with the pod that has it, else one that names it."""
        claim = await self._get(ObjectKind.CLAIM, self._target.name, WholeClaim)
        if claim is None:
            return VmEvidence(target=self._target)
        pods = await self._list(self._within(ObjectKind.POD), core.WholePod)
        seen = claim_seen(claim, claimers(pods or ()), {})
        pod = next((pod for pod in pods or () if pod.metadata.name in seen.pods), None)
        return VmEvidence(
            target=self._target,
            claims=(seen,),
            pod=vmevidence.pod_seen(pod) if pod is not None else None,
            pod_unread=pods is None,
        )

    async def _claims(self, pod: PodSeen, pods: Iterable[core.WholePod]) -> tuple[ClaimSeen, ...]:
        """Return the claims of a pod that exist and may be read."""
        by_claim = claimers(pods) if pod.claims else {}
        found = list[ClaimSeen]()
        for name in filter(None, pod.claims.values()):
            try:
                claim = await self._client.get(resource_claims(pod.namespace), name, WholeClaim)
            except NotFoundError:
                continue
            except ForbiddenError as error:
                self._unread.append(str(error))
                break
            found.append(claim_seen(claim, by_claim, {}))
        return tuple(found)

    async def _instancetype(self, vm: Vm) -> Devices:
        """Return the devices of a VM's instance type, none if the VM has none or its instance type does not exist."""
        ref = vm.spec.instancetype
        if ref is None or not ref.name:
            return Devices()
        of_cluster = ref.kind.casefold().startswith("virtualmachinecluster")
        resource = (CLUSTER_INSTANCETYPES if of_cluster else INSTANCETYPES).collection.resource
        resource = resource if of_cluster else replace(resource, namespace=self._target.namespace)
        try:
            return (await self._client.get(resource, ref.name, Instancetype)).devices
        except NotFoundError:
            return Devices()
        except ForbiddenError as error:
            self._unread.append(str(error))
            return Devices()

    async def _with_cluster(self, evidence: VmEvidence) -> VmEvidence:
        pod, units = evidence.pod, self._sharing.resource
        nodes, gpu_nodes, pods = await asyncio.gather(
            self._list(NODES, core.Node),
            self._list(GPU_NODES, GpuNode),
            self._list(RESOURCES[ObjectKind.POD], core.WholePod),
        )
        by_name = {NodeName(gpu_node.metadata.name): gpu_node for gpu_node in gpu_nodes or ()}
        waits = pod is not None and not pod.node
        is_off = evidence.vm is not None and evidence.vmi is None and pod is None
        schedules = await self._schedules() if waits or is_off else ()
        labels = {NodeName(node.metadata.name): node.metadata.labels for node in nodes or ()}
        return replace(
            evidence,
            stopped=stopped_by(schedules, evidence.vm.metadata.uid) if evidence.vm is not None and is_off else None,
            away=away(schedules, cordons(labels)) if waits else {},
            phases=await read_phases(self._client, schedules, labels, by_name),
            claims=evidence.claims or (await self._claims(pod, pods or ()) if pod is not None else ()),
            event=await self._event(pod) if pod is not None and pod.node and pod.phase == "Pending" else "",
            shares=await self._shares(pod) if pod is not None and units in evidence.requests else None,
            kubevirts=await self._kubevirts() if self._target.kind in VIRTUAL else (),
            nodes=None
            if nodes is None
            else tuple(vmevidence.node_seen(node, by_name.get(NodeName(node.metadata.name))) for node in nodes),
            pods=None
            if pods is None
            else tuple(vmevidence.pod_seen(pod) for pod in pods if pod.status.phase not in ENDED),
        )

    async def _event(self, pod: PodSeen) -> str:
        """Return the newest event that tells why a pod does not start, empty if there is none."""
        events = await self._list(
            replace(EVENTS, namespace=pod.namespace), SeenEvent, fields=f"involvedObject.uid={pod.uid}"
        )
        return newest(event for event in events or () if event.reason in FAILURES)

    async def _shares(self, seen: PodSeen) -> SharesSeen | None:
        try:
            found = shares_seen(await read_index(self._client, self._sharing), self._sharing, seen)
        except ForbiddenError as error:
            self._unread.append(str(error))
            return None
        return replace(found, unconfined=await self._why_unconfined(seen)) if found.requires_limits else found

    async def _why_unconfined(self, seen: PodSeen) -> Reason | None:
        """Return why no limit can hold in a pod; the fields for it are not in the index."""
        pod = await self._client.get(pods(seen.namespace), seen.name, ConfinedPod)
        classes = await self._list(RUNTIME_CLASSES.resource, RuntimeClass)
        handlers = handlers_of(classes) if classes is not None else None
        return why_unconfined(pod, self._sharing, handlers)

    async def _with_neighbours(self, evidence: VmEvidence) -> VmEvidence:
        """Return the evidence about a target that does not exist, with other objects of its kind."""
        kind, name, namespace = self._target.kind, self._target.name, self._target.namespace
        try:
            beside = (await self._client.list(Collection(self._within(kind), core.AnyObject))).items
        except NotFoundError:
            return replace(evidence, kubevirt_installed=False)
        everywhere = await self._list(RESOURCES[kind], core.AnyObject, name=name)
        return replace(
            evidence,
            neighbours=tuple(sorted(item.metadata.name for item in beside)),
            namespaces=tuple(
                sorted(item.metadata.namespace for item in everywhere or () if item.metadata.namespace != namespace)
            ),
        )

    async def _schedules(self) -> tuple[VgpuSchedule, ...]:
        """Return the schedules; none if they may not be read, so that the labels of nodes count alone."""
        try:
            return await read_schedules(self._client)
        except ForbiddenError as error:
            self._unread.append(str(error))
            return ()

    async def _kubevirts(self) -> tuple[KubeVirt, ...] | None:
        try:
            return await _read_kubevirts(self._client, KUBEVIRTS.path)
        except (ForbiddenError, ConfigError) as error:
            self._unread.append(str(error))
            return None

    def _within(self, kind: ObjectKind) -> Resource:
        return replace(RESOURCES[kind], namespace=self._target.namespace)

    async def _get(self, kind: ObjectKind, name: str, shape: type[T]) -> T | None:
        try:
            return await self._client.get(self._within(kind), name, shape)
        except NotFoundError:
            return None

    async def _list(
        self, resource: Resource, shape: type[T], labelled: str = "", name: str | None = None, fields: str = ""
    ) -> tuple[T, ...] | None:
        """Return the objects of a collection: none if the kind is not installed, None if it may not be listed."""
        try:
            found = Collection(resource, shape, name=name, labelled=labelled, fields=fields)
            return (await self._client.list(found)).items
        except NotFoundError:
            return ()
        except ForbiddenError as error:
            self._unread.append(str(error))
            return None


def shares_seen(index: Index, sharing: Sharing, seen: PodSeen) -> SharesSeen:
    """Return the shared GPUs as they are for a pod."""
    pod = index.pod(seen.namespace, seen.name)
    demand, needs, invalid, unconfined = None, False, "", None
    try:
        if pod is not None:
            demand = demand_of_pod(pod, sharing.resource, sharing.whole)
            needs = needs_limits(pod, demand, sharing.whole)
    except (InvalidQuantityError, UnplaceableError) as error:
        invalid = str(error)
    except InvalidAnnotationError as error:
        unconfined = meaningless(pod, error) if pod is not None else None
    if pod is None:
        return SharesSeen(sharing.resource, demand, invalid, index.nodes, shares_of_pods(index), sharing.whole)
    nodes = {name: row.usage for name, row in index.rows_for(pod).items()}
    return SharesSeen(
        sharing.resource,
        demand,
        invalid,
        nodes,
        shares_for_pod(index, pod),
        sharing.whole,
        pod.spec.priority,
        requires_limits=needs,
        unconfined=unconfined,
        limiting=frozenset(index.limiting),
    )


def cordons(labels: Labels) -> Mapping[NodeName, str]:
    """Return the schedules that have cordoned nodes."""
    return {name: found[CORDONED_BY] for name, found in labels.items() if CORDONED_BY in found}


def ask_node(credentials: Credentials, name: str, sharing: Sharing) -> NodeEvidence:
    """Return the evidence about a node; raise ConfigError if it does not exist, ApiError."""
    return asyncio.run(_read_node(Client(credentials), name, sharing))


async def _read_node(client: Client, name: str, sharing: Sharing) -> NodeEvidence:
    try:
        node = await client.get(NODES, name, core.Node)
    except NotFoundError as error:
        names = [found.metadata.name for found in (await client.list(Collection(NODES, core.AnyObject))).items]
        near = nearest(name, names)
        hint = f"did you mean node/{near}?" if near is not None else "expected a node (kubectl get nodes)"
        raise ConfigError(f"the cluster has no node {name}; {hint}", where="why") from error
    gpu_node, pods, schedules = await asyncio.gather(_gpu_node(client, name), _pods(client), listed_schedules(client))
    key = NodeName(name)
    label = node.metadata.labels.get(CORDONED_BY)
    found = away(schedules, {key: label} if label is not None else {})
    reports = {key: gpu_node} if gpu_node is not None else {}
    phases = await read_phases(client, schedules, {key: node.metadata.labels}, reports)
    seen, shares = vmevidence.node_seen(node, gpu_node), await _shares_of_pending(client, sharing, pods or ())
    return NodeEvidence(seen, pods, sharing.resource, shares, found.get(key), phases.get(key, ()))


async def _shares_of_pending(client: Client, sharing: Sharing, pods: Iterable[PodSeen]) -> Mapping[str, SharesSeen]:
    """Return the shared GPUs as they are for each pod that requests units and has no node; none if unreadable."""
    waiting = [pod for pod in pods if not pod.node and sharing.resource in pod.requests]
    try:
        index = await read_index(client, sharing) if waiting else Index(sharing)
    except ForbiddenError:
        return {}
    return {pod.user: shares_seen(index, sharing, pod) for pod in waiting}


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
    return tuple(vmevidence.pod_seen(pod) for pod in found if pod.status.phase not in ENDED)


NEVER = {str(ReasonCode.VGPU_CONFIG_OVERRIDDEN), str(ReasonCode.MODE_WITHOUT_VGPUS)}
"""Why a node gets the vGPU config of no phase."""


async def read_phases(
    client: Client, schedules: Iterable[VgpuSchedule], labels: Labels, gpu_nodes: Mapping[NodeName, GpuNode]
) -> Mapping[NodeName, tuple[NodePhase, ...]]:
    """Return the phases with a vGPU config for each of some nodes, by their labels; raises ApiError.

    A schedule that is suspended, or has faults, gives no node another vGPU config.
    """
    found = dict[NodeName, tuple[NodePhase, ...]]()
    for schedule in schedules:
        is_invalid = any(
            condition.type == VALID and condition.status == "False" for condition in schedule.status.conditions
        )
        if not schedule.config_phases or schedule.spec.suspend or is_invalid:
            continue
        known = await read_known_configs(client, schedule.metadata.namespace)
        for node, own in labels.items():
            found[node] = (*found.get(node, ()), *_of_node(schedule, node, own, gpu_nodes.get(node), known))
    return found


def _of_node(
    schedule: VgpuSchedule, node: NodeName, labels: Mapping[str, str], gpu_node: GpuNode | None, known: KnownConfigs
) -> Iterator[NodePhase]:
    status = schedule.status
    own = next((found for found in status.nodes if found.node == node), None)
    if own is not None and own.code in NEVER:
        return
    configs = (
        PhaseConfig(
            schedule.metadata.name,
            schedule.metadata.namespace,
            PhaseName(phase.name),
            phase.vgpu_config,
            _types(gpu_node, phase.vgpu_config, known),
        )
        for phase in schedule.config_phases
        if phase.vgpu_config is not None and phase.configures(labels)
    )
    # The status is of the current phase once it names the node in it.
    waits = None if own is not None and own.applied else own.message if own is not None else "it has no status yet"
    zone, following = schedule.spec.time_zone, status.next_phase
    yield from node_phases(
        configs,
        ScheduledNode(
            PhaseName(status.phase) if status.phase is not None else None,
            PhaseName(following) if following is not None else None,
            local_time(status.next_switch, zone) if status.next_switch is not None else None,
            waits,
        ),
    )


def _types(gpu_node: GpuNode | None, config: str, known: KnownConfigs) -> frozenset[str] | None:
    """Return the types that a config gives a node; None if the config, or the node's GPUs, are not known."""
    if gpu_node is None or not known.has(config):
        return None
    source = Source(Origin.GPU_NODE, "vgpuConfig of a phase")
    return types_of(gpu_node, ConfigName(config, source), known.configs)
