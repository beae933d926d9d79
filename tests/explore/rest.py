"""Checks a world at rest: the desired state is reached, or a reason names the true obstacle."""

from collections import Counter
from collections.abc import Iterator

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import FunctionKind, kind_of
from gpuvirt.model.allocation.ondemandids import is_on_demand_id
from gpuvirt.model.shares.node.records import is_unit_id
from gpuvirt_sim.devices.drivers import is_vfio
from gpuvirt_sim.devices.function import SimFunction
from tests.explore.observer import ViolationError
from tests.explore.world import World

UNKNOWN = "AllocationsUnknown"


def find_fault(world: World) -> ViolationError | None:
    """Return a deviation from the desired state without a reason, or None."""
    return next(_faults(world), None) if world.agents.running is not None else None


def _faults(world: World) -> Iterator[ViolationError]:
    for address, function in world.kernel.pci.functions.items():
        if kind_of(function.class_code, function.id.vendor) is FunctionKind.GPU and function.physfn is None:
            yield from _of_gpu(world, address, function)
    yield from _of_ids(world)
    if (fault := world.on_demand.find_fault()) is not None:
        yield fault
    if (fault := world.claims.find_fault()) is not None:
        yield fault
    if (fault := world.readmission.find_fault()) is not None:
        yield fault
    if world.neighbour is not None and world.kubelet.up and not (world.neighbour.is_selected and world.neighbour.runs):
        yield ViolationError("left over", f"the other operator's plugin is stopped; reasons: {_reasons(world)}")


def _of_gpu(world: World, address: PciAddress, function: SimFunction) -> Iterator[ViolationError]:
    mode = world.spec.gpus.get(address, world.spec.mode)
    blockers = list(_blockers(world, address))
    state = f"{address} is on {function.driver or 'no driver'}, and {mode} is desired"
    if not _is_reached(world, function, mode):
        reasons = _reasons(world)
        if not blockers:
            yield ViolationError("stuck", f"{state}; nothing is in the way; reasons: {reasons}")
        elif not any(words in reason for reason in reasons for words in blockers):
            yield ViolationError("unexplained", f"{state}; in the way: {blockers}; reasons: {reasons}")
    elif mode == "passthrough" and not blockers and not _is_offered(world, address):
        yield ViolationError("not offered", f"{state}; reasons: {_reasons(world)}")
    if function.driver is None and not function.leaving and not _may_have_none(world, blockers, mode, function):
        yield ViolationError("left over", f"{address} has no driver")
    if function.override is not None and function.override != function.driver and not blockers:
        yield ViolationError("left over", f"{state}, with driver_override {function.override}")
    if function.driver == "nvidia" and address in world.kernel.nvidia._locked:
        yield ViolationError("left over", f"{state}, with unbindLock 1: no process can open it")


def _may_have_none(world: World, blockers: list[str], mode: str, function: SimFunction) -> bool:
    """Return whether a GPU may have no driver at rest: it is in use, or its last driver refuses to bind."""
    if world.kernel.faults.refusals or [blocker for blocker in blockers if blocker != "StepFailed"]:
        return True
    return mode != "passthrough" and world.refusing == function.native_driver


def _is_reached(world: World, function: SimFunction, mode: str) -> bool:
    if mode == "passthrough":
        return is_vfio(function.driver)
    if mode in {"container", "vgpu", "on-demand"} and function.driver != function.native_driver:
        return False
    if mode == "vgpu" and world.spec.vgpu_config is not None:
        desired = world.scenario.vgpus[world.spec.vgpu_config]
        hosts = (carrier.vgpu_host for carrier in world.kernel.vfs.carriers.values())
        found = Counter(spec.name.rpartition(" ")[2] for host in hosts for spec, _ in host.live.values())
        return found == Counter(desired)
    return True


def _is_offered(world: World, address: PciAddress) -> bool:
    view = world.agents.view
    return view is not None and any(
        str(device.id) == address and device.healthy and device.allocated_to is None
        for resource in view.resources
        for device in resource.devices
    )


def _blockers(world: World, address: PciAddress) -> Iterator[str]:
    """Yield the words with which a reason would name the true obstacles to a change of a GPU."""
    parts = world.observer.with_dependents(address)
    for pod in world.kubelet.pods.values():
        may_get_it = not pod.functions and any(is_on_demand_id(device) or is_unit_id(device) for _, device in pod.keys)
        # An id of NVIDIA's plugin that names no GPU any more may name any: only a driver knows the ids of its GPUs.
        may_get_it = may_get_it or not pod.functions <= world.kernel.pci.functions.keys()
        if pod.has_devices and (may_get_it or world.observer.devices_of(pod) & parts):
            yield pod.name
            yield pod.uid
            yield from () if pod.known else ("a pod that is being admitted",)
    for part in parts:
        for user in world.observer.users(part):
            yield user.rpartition("pid ")[2].rstrip(")")
    is_whole = world.spec.gpus.get(address, world.spec.mode) == "passthrough"
    if world.observer.keeps_memory(address, whole=is_whole) or address in world.observer.may_be_given_again:
        yield "NoReset"
    if not world.kubelet.up or world.kubelet.unreadable or not world.kubelet.paths.checkpoint.exists():
        yield UNKNOWN
    if any(pod.forgotten and pod.has_devices for pod in world.kubelet.pods.values()):
        yield UNKNOWN
    if world.kubelet.is_silent:
        yield "StillAllocatable"
    if world.kernel.faults.refusals or world.refusing is not None:
        yield "StepFailed"


def _reasons(world: World) -> list[str]:
    view = world.agents.view
    if view is None:
        return []
    found = [note.text for note in view.problems]
    found += [reason.text for gpu in (*view.gpus, *view.functions) for reason in gpu.reasons]
    return found


def _of_ids(world: World) -> Iterator[ViolationError]:
    """Yield vGPUs of a config whose ids differ from those of the first time that the config was reached."""
    config = world.spec.vgpu_config
    if config is None or world.spec.mode != "vgpu":
        return
    found = frozenset(world.kernel.mdev.devices)
    before = world.vgpu_ids.setdefault(config, found)
    if before != found and len(before) == len(found):
        yield ViolationError("ids", f"the vGPUs of {config} were {sorted(before)}, and are {sorted(found)}")
