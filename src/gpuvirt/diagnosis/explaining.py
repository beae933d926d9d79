"""Follows one device through its stages: `gpuvirt why`.

A blocker has the code and words of a reason of `gpuvirt devices`, or of a finding of `gpuvirt doctor`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuvirt.diagnosis.checks import drivers, iommu, kubelet, kubevirt
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.explanation import STEPS, DeviceExplanation, StageName, StageResult, assemble, blocked, progress
from gpuvirt.diagnosis.findings import Finding, listed, of_reason, problem
from gpuvirt.diagnosis.target import no_device, no_gpu, no_resource, no_such_uuid, pci_address
from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import FunctionKind, Unread
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.allocation.pluginanswers import is_nvidias_id
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.inventory.isolation import group_blockers
from gpuvirt.model.offers.ondemand.typesannotation import with_type
from gpuvirt.model.offers.view import DeviceView, GpuView, ResourceView, VgpuView
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, count_of, nodeproblems, refusals
from gpuvirt.model.reasons.codes import Level

KEEPS_DRIVER = frozenset(
    {
        ReasonCode.IN_USE,
        ReasonCode.ALLOCATED_TO_POD,
        ReasonCode.PROCESSES_NOT_VISIBLE,
        ReasonCode.USED_BY_HOST,
        ReasonCode.FOREIGN_ENDPOINT,
        ReasonCode.DRIVER_LOCK,
        ReasonCode.STEP_FAILED,
        ReasonCode.WRITE_BLOCKED,
        ReasonCode.UNIT_BUSY,
        ReasonCode.GATE_FAILED,
        ReasonCode.PLAN_OUTDATED,
    }
)
"""Why the agent does not bind a GPU to its desired driver."""

DELAYS_WITHDRAWAL = KEEPS_DRIVER | {ReasonCode.VGPU_IN_USE}
"""Why a device that is no longer offered has not changed yet."""

FOR_VMS = "only for VMs, and pods share this GPU"
CREATED = "of the vGPU that is created when a pod starts"
NO_AGENT = "no agent runs on this host, which would offer it to pods"


def explain_device(evidence: Evidence, target: str) -> DeviceExplanation:
    """Return the explanation of an address, a vGPU's id, or a resource's name."""
    invalid = tuple(of_reason(value.reason, Level.ERROR) for value in evidence.view.invalid)
    return replace(_explain(evidence, target), invalid=invalid)


def _explain(evidence: Evidence, target: str) -> DeviceExplanation:
    address = pci_address(target)
    if address is not None:
        return _of_function(evidence, target, address)
    for gpu in evidence.view.gpus:
        for vgpu in gpu.vgpus:
            if vgpu.id == target.lower():
                return _Explainer(evidence, gpu, vgpu).explain(target)
    if is_nvidias_id(target):
        return _not_found(target, None, None, no_such_uuid(target))
    return _of_resource(evidence, target)


def _of_function(evidence: Evidence, target: str, address: PciAddress) -> DeviceExplanation:
    views = (*evidence.view.gpus, *evidence.view.functions)
    shown = next((function for function in views if function.address == address), None)
    carried = [(gpu, vgpu) for gpu in evidence.view.gpus for vgpu in gpu.vgpus if str(vgpu.id) == address]
    if carried:
        return _Explainer(evidence, *carried[0]).explain(target)
    if shown is not None and (given := _given_on_demand(evidence, shown)):
        ways = [_Explainer(evidence, shown, None, resource).explain(target) for resource in given]
        return replace(max(ways, key=progress), resource=None, resource_type=None)
    if shown is not None and shown.vgpus:
        ways = [_Explainer(evidence, shown, vgpu).explain(target) for vgpu in shown.vgpus]
        return max(ways, key=progress)
    if shown is not None:
        return _Explainer(evidence, shown, None).explain(target)
    function = evidence.function(address)
    blocker = no_device(evidence, address) if function is None else no_gpu(function)
    return _not_found(target, address, None, blocker)


def _of_resource(evidence: Evidence, target: str) -> DeviceExplanation:
    names = {
        name: resource for resource in evidence.view.resources for name in (str(resource.name), *resource.also_called)
    }
    without_domain = target.rpartition("/")[2]
    resource = names.get(target) or next(
        (resource for name, resource in names.items() if name.rpartition("/")[2] == without_domain), None
    )
    if resource is None or (resource.name != target and "/" in target and target not in resource.also_called):
        return _not_found(target, None, None, no_resource(evidence, target))
    creating = [gpu for gpu in evidence.view.gpus if resource in _given_on_demand(evidence, gpu)]
    if creating:
        ways = [_Explainer(evidence, gpu, None, resource).explain(target) for gpu in creating]
        return replace(max(ways, key=progress), device=None)
    owners = {device: (gpu, vgpu) for device, gpu, vgpu in _owners(evidence)}
    ids = (str(device.vgpu or device.id) for device in resource.devices)
    ways = [_Explainer(evidence, *owners[device]).explain(target) for device in ids if device in owners]
    if not ways and resource.on_demand is not None:
        found = _not_found(target, None, resource.name, _no_room(evidence, resource))
        return replace(found, resource_type=resource.on_demand)
    if not ways:
        blocker = problem(
            FindingCode.NO_SUCH_DEVICE,
            resource.name,
            "has no device on this node any more",
            fix=("gpuvirt devices lists the GPUs of this node, and why each is not offered",),
        )
        return _not_found(target, None, resource.name, blocker)
    return max(ways, key=progress)


def _not_found(target: str, device: str | None, resource: str | None, blocker: Finding) -> DeviceExplanation:
    return assemble(target, device, resource, [blocked(StageName.BUS, blocker)])


def _given_on_demand(evidence: Evidence, gpu: GpuView) -> Sequence[ResourceView]:
    """Return the resources of which a GPU in mode on-demand creates another vGPU when a pod starts."""
    if gpu.reasons:
        return ()
    types = evidence.creatable_on_demand(gpu)
    return [resource for resource in evidence.view.resources if resource.on_demand in types]


def _no_room(evidence: Evidence, resource: ResourceView) -> Finding:
    """Return why no GPU in mode on-demand has room for a resource, with what prevents it on each of them."""
    gpus = [gpu for gpu in evidence.view.gpus if evidence.desired_of(gpu) == DesiredMode.ON_DEMAND]
    against = {gpu.address: gpu.reasons[0] for gpu in gpus if gpu.reasons}
    if len(gpus) == len(against) == 1:
        return of_reason(against[gpus[0].address], Level.ERROR)
    is_reason = bool(gpus) and len(against) == len(gpus)
    ends = () if is_reason else ("it fits when the pods of one of these GPUs have ended",)
    return problem(
        against[gpus[0].address].code if is_reason else FindingCode.ALL_ALLOCATED,
        resource.name,
        "fits on no GPU in mode on-demand now",
        tuple(
            Seen(gpu.address, against[gpu.address].text if gpu.address in against else _carried(gpu)) for gpu in gpus
        ),
        fix=(*ends, *(f"gpuvirt why {address}" for address in against)),
    )


def _carried(gpu: GpuView) -> str:
    types = Counter(vgpu.type for vgpu in gpu.vgpus)
    users = dict.fromkeys(user for vgpu in gpu.vgpus for user in vgpu.users)
    carried = ", ".join(f"{number} x {vgpu_type}" for vgpu_type, number in sorted(types.items()))
    return f"carries {carried or 'no vGPU'}: {listed(users) or 'no user'}"


def _owners(evidence: Evidence) -> Iterator[tuple[str, GpuView, VgpuView | None]]:
    for function in (*evidence.view.gpus, *evidence.view.functions):
        yield str(function.address), function, None
        for vgpu in function.vgpus:
            yield str(vgpu.id), function, vgpu


def _free_ids(devices: Iterable[DeviceView]) -> Iterator[DeviceView]:
    """Yield the ids of an on-demand resource for which a vGPU is created."""
    return (device for device in devices if device.healthy and device.vgpu is None and device.allocated_to is None)


UNBOUND = (ReasonCode.NATIVE_DRIVER, ReasonCode.NO_DRIVER)
"""The reasons of a GPU that vfio-pci would have, if it were bound."""


class _Explainer:
    """Evaluates the stages of one device: a whole function, a vGPU on it, or one that it creates on demand."""

    def __init__(
        self, evidence: Evidence, gpu: GpuView, vgpu: VgpuView | None, on_demand: ResourceView | None = None
    ) -> None:
        self._evidence = evidence
        self._gpu = gpu
        self._vgpu = vgpu
        self._id = str(vgpu.id if vgpu is not None else gpu.address)
        reasons = vgpu.reasons if vgpu is not None else gpu.reasons
        self._against: dict[StageName, Reason] = {}
        for reason in reasons:
            self._against.setdefault(STEPS.get(reason.code, StageName.OFFERED), reason)
        notes = evidence.view.problems
        keeps_driver = [note for note in notes if note.subject == gpu.address and note.code in KEEPS_DRIVER]
        if keeps_driver and StageName.DRIVER in self._against:  # the agent would bind it, but this reason prevents that
            self._against[StageName.DRIVER] = keeps_driver[0]
        withdrawn = self._against.get(StageName.OFFERED)
        delays = (note for note in notes if note.subject == self._id and note.code in DELAYS_WITHDRAWAL)
        if withdrawn is not None and withdrawn.code is ReasonCode.WITHDRAWN and (delay := next(delays, None)):
            self._against[StageName.OFFERED] = replace(
                withdrawn,
                message=f"{withdrawn.message}; that waits ({delay.code}): it {delay.message}",
                places=(*withdrawn.places, *delay.places),
                fix=f"{delay.fix}; or {withdrawn.fix}",
            )
        offered = vgpu.offered_as if vgpu is not None else gpu.offered_as
        offers = (resource for resource in evidence.view.resources if resource.name == offered)
        self._resource = on_demand or next(offers, None)
        self._on_demand = on_demand is not None

    def explain(self, target: str) -> DeviceExplanation:
        name = self._resource.name if self._resource is not None else None
        vgpu_type = self._resource.on_demand if self._resource is not None else None
        found = assemble(target, self._id, name, self._stages())
        return replace(found, resource_type=vgpu_type, on_demand=self._on_demand)

    def _stages(self) -> Iterator[StageResult[StageName]]:
        yield self._bus()
        evidence = self._evidence
        shared = evidence.view.agent is None and evidence.desired_of(self._gpu) == DesiredMode.SHARED
        if self._vgpu is None and (self._gpu.units is not None or shared):
            yield from self._shared_stages()
            return
        yield from self._on_demand_stages() if self._on_demand else self._own_stages()
        if self._resource is not None:
            yield self._registered(self._resource)
            yield self._counted(self._resource)
            yield self._free(self._resource)
            yield self._permitted(self._resource)

    def _on_demand_stages(self) -> Iterator[StageResult[StageName]]:
        yield StageResult(StageName.IOMMU_GROUP, CREATED, skipped=True)
        yield StageResult(StageName.WHOLE_GROUP, CREATED, skipped=True)
        yield StageResult(StageName.DRIVER, f"bound to {self._gpu.driver}")
        yield StageResult(StageName.NODE, CREATED, skipped=True)
        given = _given_on_demand(self._evidence, self._gpu)
        names = (with_type(resource.name, resource.on_demand) for resource in given)
        yield StageResult(StageName.OFFERED, f"offered on demand as {listed(names)}")

    def _own_stages(self) -> Iterator[StageResult[StageName]]:
        yield self._iommu_group()
        yield self._whole_group()
        yield self._driver()
        yield self._stage(StageName.NODE, self._node())
        offered = with_type(self._resource.name, self._resource.on_demand) if self._resource is not None else None
        yield self._stage(StageName.OFFERED, f"offered as {offered}" if offered is not None else "not offered")

    def _shared_stages(self) -> Iterator[StageResult[StageName]]:
        """Yield the stages of a GPU in mode `shared`, of which pods get units by its native driver."""
        for step in StageName:
            if step is StageName.OFFERED:
                yield self._units_offered()
            elif step is not StageName.BUS:
                yield StageResult(step, FOR_VMS, skipped=True)

    def _units_offered(self) -> StageResult[StageName]:
        reason, resource = next(iter(self._gpu.reasons), None), self._evidence.view.shared.resource
        if self._evidence.view.agent is None:
            return StageResult(StageName.OFFERED, NO_AGENT, self._no_agent())
        if reason is not None:
            return blocked(StageName.OFFERED, of_reason(reason, Level.ERROR))
        return StageResult(
            StageName.OFFERED, f"{count_of(self._gpu.units or 0, 'unit')} of {resource} are offered to pods"
        )

    def _no_agent(self) -> Finding:
        found = kubelet.registration(self._evidence)
        away = nodeproblems.kubelet_away("the device", self._evidence.kubelet.socket)
        return next((finding for finding in found if finding.level is not Level.OK), of_reason(away, Level.ERROR))

    def _stage(self, step: StageName, message: str) -> StageResult[StageName]:
        """Return a stage that only a reason of the device itself can block."""
        reason = self._against.get(step)
        if reason is None:
            return StageResult(step, message)
        return blocked(step, of_reason(reason, Level.ERROR))

    def _driver(self) -> StageResult[StageName]:
        reason = self._against.get(StageName.DRIVER)
        is_unbound = self._vgpu is None and reason is not None and reason.code in UNBOUND
        if is_unbound and (why := next(drivers.why_not_loadable(self._evidence.setup), None)) is not None:
            message = f"{self._id} can't get vfio-pci: {why.subject} {why.message}"
            return StageResult(StageName.DRIVER, message, of_reason(why, Level.ERROR))
        return self._stage(
            StageName.DRIVER, f"bound to {self._gpu.driver}" if self._gpu.driver else "bound to no driver"
        )

    def _bus(self) -> StageResult[StageName]:
        gpu = f"{self._gpu.name or self._gpu.pci_id} at {self._gpu.address}"
        return self._stage(StageName.BUS, f"{gpu}, {self._vgpu.type} {self._vgpu.id}" if self._vgpu else gpu)

    def _iommu_group(self) -> StageResult[StageName]:
        own = self._evidence.inventory.vgpus.get(self._vgpu.id) if self._vgpu is not None else None
        function = self._evidence.function(self._gpu.address)
        group = own.live.group if own is not None else function.iommu_group if function is not None else None
        if isinstance(group, int):
            is_mdev = own is not None and own.framework is Framework.MDEV  # the host's driver isolates it
            found = next(iommu.interrupt_remapping(self._evidence), None) if not is_mdev else None
            if found is not None and found.level is Level.ERROR:
                message = f"in IOMMU group {group}, but {found.subject} {found.message}"
                return StageResult(StageName.IOMMU_GROUP, message, found)
            return self._stage(StageName.IOMMU_GROUP, f"in IOMMU group {group}")
        if isinstance(group, Unread):
            reason = refusals.unread(self._id, group)
            return StageResult(StageName.IOMMU_GROUP, "its IOMMU group can't be read", of_reason(reason, Level.ERROR))
        # The IOMMU check reports why the host has no groups at all.
        found = next((found for found in iommu.iommu(self._evidence) if found.level is Level.ERROR), None)
        if found is not None:
            message = f"{self._id} is in no IOMMU group: {found.subject} {found.message}"
            return StageResult(StageName.IOMMU_GROUP, message, found)
        no_group = refusals.no_group(self._id)
        reason = self._against.get(StageName.IOMMU_GROUP, no_group)
        return blocked(StageName.IOMMU_GROUP, of_reason(reason, Level.ERROR))

    def _whole_group(self) -> StageResult[StageName]:
        gpu = self._evidence.inventory.gpus.get(self._gpu.address)
        members = self._evidence.inventory.groups.get(self._gpu.group, ()) if self._gpu.group is not None else ()
        others = [address for address in members if address != self._gpu.address]
        if gpu is None or self._vgpu is not None:
            beside = f"shared with {', '.join(others)}; " if others and self._vgpu is None else ""
            return self._stage(StageName.WHOLE_GROUP, f"{beside}no host driver prevents opening it")
        spoiling = group_blockers(self._evidence.inventory.facts.functions, others)
        if not gpu.function.on_vfio:  # gpuvirt binds the functions of the GPU's slot together with the GPU
            slot = slot_of(gpu.function.address)
            spoiling = tuple(function for function in spoiling if slot_of(function.address) != slot)
        if spoiling:
            return blocked(StageName.WHOLE_GROUP, drivers.not_viable(gpu, spoiling))
        if not others:
            return self._stage(StageName.WHOLE_GROUP, "the GPU is alone in it")
        functions = self._evidence.inventory.facts.functions
        moving = [address for address in others if functions[address].kind is not FunctionKind.BRIDGE]
        if gpu.function.on_vfio or not moving:
            state = "no host driver prevents opening it"
        else:
            subject = "they change" if moving == others else f"{', '.join(moving)} changes"
            state = f"{subject} drivers with the GPU"
        return self._stage(StageName.WHOLE_GROUP, f"shared with {', '.join(others)}; {state}")

    def _node(self) -> str:
        device = self._device()
        nodes = device.nodes if device is not None else ()
        return f"a VM opens {', '.join(nodes)}" if nodes else "its device nodes exist"

    def _device(self) -> DeviceView | None:
        devices = self._resource.devices if self._resource is not None else ()
        if self._on_demand:
            return next(_free_ids(devices), None)
        return next((device for device in devices if self._id in {device.id, device.vgpu}), None)

    def _registered(self, resource: ResourceView) -> StageResult[StageName]:
        listening = next(kubelet.listening(self._evidence))
        if not self._evidence.kubelet.ever_ran:
            away = nodeproblems.kubelet_away("the device", self._evidence.kubelet.socket)
            return blocked(StageName.REGISTERED, of_reason(away, Level.ERROR))
        if listening.level is not Level.OK:
            return blocked(StageName.REGISTERED, listening)
        if self._evidence.view.agent is None and kubelet.is_counted(self._evidence, resource.name):
            plugin = kubelet.other_plugin(self._evidence)
            return StageResult(StageName.REGISTERED, f"{plugin} has registered {resource.name} at the kubelet")
        if self._evidence.view.agent is None:
            no_agent = next(kubelet.registration(self._evidence), None)
            message = "no agent runs on this host, so the resource is not registered at the kubelet"
            return StageResult(StageName.REGISTERED, message, no_agent)
        if not resource.registered:
            because = resource.not_registered_because or nodeproblems.not_registered(resource.name)
            return blocked(StageName.REGISTERED, of_reason(because, Level.ERROR))
        return StageResult(StageName.REGISTERED, f"{resource.name} is registered at the kubelet")

    def _counted(self, resource: ResourceView) -> StageResult[StageName]:
        counted = self._evidence.kubelet.counted
        if isinstance(counted, Unread) or counted is None:
            return StageResult(StageName.COUNTED, "the kubelet's healthy devices could not be read", skipped=True)
        device = self._device()
        listed_id = str(device.id) if device is not None else self._id
        if listed_id in counted.get(str(resource.name), frozenset()):
            return StageResult(StageName.COUNTED, "the kubelet counts it as healthy")
        blocker = problem(
            FindingCode.NOT_COUNTED,
            listed_id,
            f"is not among the healthy devices of {resource.name} that the kubelet counts",
            (Seen(self._evidence.kubelet.counted_by, f"{len(counted.get(resource.name, ()))} of {resource.name}"),),
            fix=("run this command again in a few seconds", "if nothing has changed: gpuvirt doctor"),
        )
        return blocked(StageName.COUNTED, blocker)

    def _free(self, resource: ResourceView) -> StageResult[StageName]:
        pods = self._pods()
        if pods:
            reason = refusals.allocated_to_pod(self._id, pods)
            blocker = of_reason(reason, Level.ERROR, f"or request another device of {resource.name}")
            return StageResult(StageName.FREE, f"allocated to {listed(pods)}", blocker)
        if (unknown := self._allocations_unknown()) is not None:
            return blocked(StageName.FREE, of_reason(replace(unknown, subject=self._id), Level.ERROR))
        if self._on_demand:
            free = f"free {sum(1 for _ in _free_ids(resource.devices))} of {len(resource.devices)}"
            return StageResult(StageName.FREE, f"{free}; a vGPU is created when a pod starts")
        return self._stage(StageName.FREE, "not allocated to any pod")

    def _pods(self) -> tuple[str, ...]:
        """Return the pods that have the device: by the view, and without an agent by the kubelet, too."""
        device, allocations = self._device(), self._evidence.allocations
        if device is not None and device.allocated_to is not None:
            return (device.allocated_to,)
        if self._on_demand:
            return ()
        if self._vgpu is not None:
            return allocations.vgpus.get(self._vgpu.id, ())
        return allocations.functions.get(self._gpu.address, ())

    def _allocations_unknown(self) -> Reason | None:
        """Return why the device may be allocated to a pod that neither the agent nor this command knows."""
        notes = (note for note in self._evidence.view.problems if note.code is ReasonCode.ALLOCATIONS_UNKNOWN)
        own = (note for note in notes if pci_address(note.subject) in {None, self._gpu.address})
        return self._evidence.allocations.unknown or next(own, None)

    def _permitted(self, resource: ResourceView) -> StageResult[StageName]:
        if self._evidence.kubevirts is None:
            return StageResult(StageName.PERMITTED, "not checked: pass --kubevirt FILE", skipped=True)
        for found in kubevirt.permitted_names(self._evidence):
            if found.subject == resource.name and found.level is Level.ERROR:
                return blocked(StageName.PERMITTED, found)
        return StageResult(StageName.PERMITTED, f"KubeVirt permits {resource.name}")
