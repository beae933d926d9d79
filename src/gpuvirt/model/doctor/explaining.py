"""Walks a device's way over the evidence: `gpuvirt why`.

What blocks is said in the words of `gpuvirt devices` and of the checks, which know it already.
"""

from collections.abc import Iterator
from dataclasses import replace

from gpuvirt.facts.ids import PciAddress, slot_of
from gpuvirt.facts.pci import Unread
from gpuvirt.model.doctor.checks import drivers, iommu, kubelet, kubevirt
from gpuvirt.model.doctor.checks.vgpu import vgpus
from gpuvirt.model.doctor.evidence import Evidence
from gpuvirt.model.doctor.explanation import STEPS, Found, Step, Way, assemble, progress
from gpuvirt.model.doctor.findings import Finding, of_reason, problem
from gpuvirt.model.doctor.target import no_device, no_gpu, no_resource, pci_address
from gpuvirt.model.inventory.isolation import spoilers
from gpuvirt.model.offers.view import DeviceView, GpuView, ResourceView, VgpuView
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen, nodeproblems, refusals
from gpuvirt.model.reasons.codes import Level

MOVES = frozenset(
    {
        ReasonCode.IN_USE,
        ReasonCode.HELD_BY_POD,
        ReasonCode.PROCESSES_NOT_VISIBLE,
        ReasonCode.USED_BY_HOST,
        ReasonCode.FOREIGN_ENDPOINT,
        ReasonCode.DRIVER_LOCK,
        ReasonCode.STEP_FAILED,
        ReasonCode.WRITE_BLOCKED,
        ReasonCode.UNIT_BUSY,
        ReasonCode.PLAN_OUTDATED,
    }
)
"""Why a GPU is not moved to the driver that is wanted for it."""


def walk(evidence: Evidence, target: str) -> Way:
    """Return the way of what was asked for: an address, a vGPU's id, or a resource's name."""
    invalid = tuple(of_reason(one.reason, Level.ERROR) for one in evidence.view.invalid)
    return replace(_walk(evidence, target), invalid=invalid)


def _walk(evidence: Evidence, target: str) -> Way:
    address = pci_address(target)
    if address is not None:
        return _of_function(evidence, target, address)
    for gpu in evidence.view.gpus:
        for vgpu in gpu.vgpus:
            if vgpu.id == target.lower():
                return _Walker(evidence, gpu, vgpu).way(target)
    return _of_resource(evidence, target)


def _of_function(evidence: Evidence, target: str, address: PciAddress) -> Way:
    shown = next((one for one in (*evidence.view.gpus, *evidence.view.functions) if one.address == address), None)
    carried = [(gpu, vgpu) for gpu in evidence.view.gpus for vgpu in gpu.vgpus if str(vgpu.id) == address]
    if carried:
        return _Walker(evidence, *carried[0]).way(target)
    if shown is not None and shown.vgpus:
        ways = [_Walker(evidence, shown, vgpu).way(target) for vgpu in shown.vgpus]
        return max(ways, key=progress)
    if shown is not None:
        return _Walker(evidence, shown, None).way(target)
    function = evidence.function(address)
    blocker = no_device(evidence, address) if function is None else no_gpu(function)
    return _nothing(target, address, None, blocker)


def _of_resource(evidence: Evidence, target: str) -> Way:
    names = {name: one for one in evidence.view.resources for name in (str(one.name), *one.also_called)}
    resource = names.get(target) or next(
        (one for name, one in names.items() if name.rpartition("/")[2] == target.rpartition("/")[2]), None
    )
    if resource is None or (resource.name != target and "/" in target and target not in resource.also_called):
        return _nothing(target, None, None, no_resource(evidence, target))
    owners = {device: (gpu, vgpu) for device, gpu, vgpu in _owners(evidence)}
    ways = [
        _Walker(evidence, *owners[str(device.id)]).way(target)
        for device in resource.devices
        if str(device.id) in owners
    ]
    if not ways:
        blocker = problem(
            FindingCode.NO_SUCH_DEVICE,
            resource.name,
            "has no device on this node any more",
            fix=("gpuvirt devices says what became of them",),
        )
        return _nothing(target, None, resource.name, blocker)
    return max(ways, key=progress)


def _nothing(target: str, device: str | None, resource: str | None, blocker: Finding) -> Way:
    return assemble(target, device, resource, [Found(Step.BUS, f"{blocker.subject} {blocker.message}", blocker)])


def _owners(evidence: Evidence) -> Iterator[tuple[str, GpuView, VgpuView | None]]:
    for one in (*evidence.view.gpus, *evidence.view.functions):
        yield str(one.address), one, None
        for vgpu in one.vgpus:
            yield str(vgpu.id), one, vgpu


class _Walker:
    """The way of one device: a function as a whole, or a vGPU on it."""

    def __init__(self, evidence: Evidence, gpu: GpuView, vgpu: VgpuView | None) -> None:
        self._evidence = evidence
        self._gpu = gpu
        self._vgpu = vgpu
        self._id = str(vgpu.id if vgpu is not None else gpu.address)
        reasons = vgpu.reasons if vgpu is not None else gpu.reasons
        self._against: dict[Step, Reason] = {}
        for reason in reasons:
            self._against.setdefault(STEPS.get(reason.code, Step.OFFERED), reason)
        moves = [one for one in evidence.view.notes if one.subject == gpu.address and one.code in MOVES]
        if moves and Step.DRIVER in self._against:  # the agent would bring it there, and is kept from it
            self._against[Step.DRIVER] = moves[0]
        offered = vgpu.offered_as if vgpu is not None else gpu.offered_as
        self._resource = next((one for one in evidence.view.resources if one.name == offered), None)

    def way(self, target: str) -> Way:
        name = self._resource.name if self._resource is not None else None
        return assemble(target, self._id, name, self._stages())

    def _stages(self) -> Iterator[Found]:
        yield self._bus()
        yield self._iommu_group()
        yield self._whole_group()
        yield self._stage(Step.DRIVER, self._driver())
        yield self._stage(Step.NODE, self._node())
        yield self._stage(Step.OFFERED, f"offered as {self._resource.name}" if self._resource else "not offered")
        if self._resource is not None:
            yield self._registered(self._resource)
            yield self._counted(self._resource)
            yield self._free(self._resource)
            yield self._permitted(self._resource)

    def _stage(self, step: Step, message: str) -> Found:
        """Return a stage that only a reason of the device's own can block."""
        reason = self._against.get(step)
        if reason is None:
            return Found(step, message)
        if reason.code is ReasonCode.NO_VGPUS:
            for found in vgpus(self._evidence):
                if found.code is reason.code and found.subject == reason.subject:
                    return Found(step, f"{found.subject} {found.message}", found)
        return Found(step, f"{reason.subject} {reason.message}", of_reason(reason, Level.ERROR))

    def _bus(self) -> Found:
        what = f"{self._gpu.name or self._gpu.pci_id} at {self._gpu.address}"
        return self._stage(Step.BUS, f"{what}, {self._vgpu.type} {self._vgpu.id}" if self._vgpu else what)

    def _iommu_group(self) -> Found:
        own = self._evidence.inventory.vgpus.get(self._vgpu.id) if self._vgpu is not None else None
        function = self._evidence.function(self._gpu.address)
        group = own.live.group if own is not None else function.iommu_group if function is not None else None
        if isinstance(group, int):
            return self._stage(Step.IOMMU_GROUP, f"in IOMMU group {group}")
        if isinstance(group, Unread):
            reason = refusals.unread(self._id, group)
            return Found(Step.IOMMU_GROUP, "which group it is in can't be read", of_reason(reason, Level.ERROR))
        # Why there are no groups at all is what the check of the IOMMU knows.
        of_host = (one for one in iommu.iommu(self._evidence) if one.level is Level.ERROR)
        found = next(of_host, None)
        if found is not None:
            return Found(Step.IOMMU_GROUP, f"{self._id} is in no IOMMU group: {found.subject} {found.message}", found)
        no_group = refusals.no_group(self._id, is_mdev=self._vgpu is not None)
        return self._stage_of(Step.IOMMU_GROUP, no_group)

    def _stage_of(self, step: Step, reason: Reason) -> Found:
        reason = self._against.get(step, reason)
        return Found(step, f"{reason.subject} {reason.message}", of_reason(reason, Level.ERROR))

    def _whole_group(self) -> Found:
        gpu = self._evidence.inventory.gpus.get(self._gpu.address)
        members = self._evidence.inventory.groups.get(self._gpu.group, ()) if self._gpu.group is not None else ()
        others = [one for one in members if one != self._gpu.address]
        if gpu is not None and self._vgpu is None:
            spoiling = spoilers(self._evidence.inventory.facts.functions, others)
            if not gpu.function.on_vfio:  # what is on its own card moves with it
                spoiling = tuple(one for one in spoiling if slot_of(one.address) != slot_of(gpu.function.address))
            if spoiling:
                found = drivers.not_viable(gpu, spoiling)
                return Found(Step.WHOLE_GROUP, f"{found.subject} {found.message}", found)
        beside = f"with {', '.join(others)}" if others and self._vgpu is None else "alone in it"
        moved = gpu is not None and not gpu.function.on_vfio and others and self._vgpu is None
        return self._stage(Step.WHOLE_GROUP, f"{beside}; {'they move with it' if moved else 'nothing keeps it shut'}")

    def _driver(self) -> str:
        return f"on {self._gpu.driver}" if self._gpu.driver else "on no driver"

    def _node(self) -> str:
        device = self._device()
        return f"opens by {', '.join(device.nodes)}" if device is not None and device.nodes else "has its nodes"

    def _device(self) -> DeviceView | None:
        devices = self._resource.devices if self._resource is not None else ()
        return next((one for one in devices if one.id == self._id), None)

    def _registered(self, resource: ResourceView) -> Found:
        listening = next(kubelet.listening(self._evidence))
        if not self._evidence.kubelet.ever_ran:
            away = nodeproblems.kubelet_away("the device", self._evidence.kubelet.socket)
            return Found(Step.REGISTERED, f"{away.subject} {away.message}", of_reason(away, Level.ERROR))
        if listening.level is not Level.OK:
            return Found(Step.REGISTERED, f"{listening.subject} {listening.message}", listening)
        if self._evidence.view.agent is None:
            away_agent = next(kubelet.registration(self._evidence), None)
            return Found(Step.REGISTERED, "no agent runs here, so the kubelet is not told of it", away_agent)
        if not resource.registered:
            because = resource.not_registered_because or nodeproblems.not_registered(resource.name)
            return Found(Step.REGISTERED, f"{because.subject} {because.message}", of_reason(because, Level.ERROR))
        return Found(Step.REGISTERED, f"the kubelet knows {resource.name}")

    def _counted(self, resource: ResourceView) -> Found:
        counted = self._evidence.kubelet.counted
        if isinstance(counted, Unread) or counted is None:
            return Found(Step.COUNTED, "what the kubelet counts could not be read", skipped=True)
        if self._id in counted.get(str(resource.name), frozenset()):
            return Found(Step.COUNTED, "the kubelet counts it as healthy")
        blocker = problem(
            FindingCode.NOT_COUNTED,
            self._id,
            f"is not among the healthy devices of {resource.name} that the kubelet counts",
            (Seen(self._evidence.kubelet.counted_by, f"{len(counted.get(resource.name, ()))} of {resource.name}"),),
            fix=("look once more in a few seconds", "if it stays so: gpuvirt doctor"),
        )
        return Found(Step.COUNTED, f"{self._id} {blocker.message}", blocker)

    def _free(self, resource: ResourceView) -> Found:
        device = self._device()
        allocated_to = device.allocated_to if device is not None else None
        if allocated_to is None:
            return self._stage(Step.FREE, "nobody has it")
        blocker = Finding(
            Level.ERROR,
            self._id,
            f"is held by {allocated_to}",
            ReasonCode.HELD_BY_POD,
            (Seen(f"gpuvirt devices, {resource.name}", allocated_to),),
            fix=("stop that machine, or ask for another device of this resource",),
        )
        return Found(Step.FREE, f"held by {allocated_to}", blocker)

    def _permitted(self, resource: ResourceView) -> Found:
        if self._evidence.kubevirts is None:
            return Found(Step.PERMITTED, "not looked at: give --kubevirt FILE", skipped=True)
        for found in kubevirt.permitted_names(self._evidence):
            if found.subject == resource.name and found.level is Level.ERROR:
                return Found(Step.PERMITTED, f"{found.subject} {found.message}", found)
        return Found(Step.PERMITTED, f"KubeVirt permits {resource.name}")
