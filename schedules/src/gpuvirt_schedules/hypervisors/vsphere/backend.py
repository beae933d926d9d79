"""The back end of a vCenter: the possible actions on its VMs, from their hosts' vGPU types, and the calls."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic  # noqa: TID251  how long to wait for a task, in a process of its own
from typing import TypeVar

import msgspec
from pyVmomi import vim, vmodl

from gpuvirt.model.workers.hypervisor import Abilities, Ability, Action, Call, Power, VmKey, WorkerVm
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem
from gpuvirt_schedules.hypervisors.vsphere.session import VsphereSession, problem_of

Collector = vmodl.query.PropertyCollector
T = TypeVar("T")
PAGE = 200
"""Objects in an answer: pyVmomi has the whole answer and its objects in memory at once, 0.1 MiB a VM with devices."""


class FoundObject(msgspec.Struct, frozen=True):
    """One object with those of its properties that have a value."""

    reference: object
    values: dict[str, object]
    missing: tuple[str, ...]
    """The paths that the vCenter could not or may not read, each with the fault."""

    def value(self, path: str, kind: type[T]) -> T | None:
        """Return a property's value; None where it has none. Raises BackEndError for a value of another type."""
        value = self.values.get(path)
        if value is None or isinstance(value, kind):
            return value
        raise BackEndError(Problem.INCOMPLETE, f"{path} is a {type(value).__name__}", is_certain=True)


def collected(content: vim.ServiceInstanceContent, spec: Collector.FilterSpec) -> Iterator[FoundObject]:
    """Yield all objects of a filter, page by page; raises BackEndError. A session that has ended is SESSION_LOST."""
    collector = content.propertyCollector
    page = collector.RetrievePropertiesEx([spec], Collector.RetrieveOptions(maxObjects=PAGE))
    while page is not None:
        for entry in page.objects:
            faults = [(missing.path, missing.fault) for missing in entry.missingSet or ()]
            for _, fault in faults:
                if isinstance(fault, vim.fault.NotAuthenticated):
                    raise problem_of(fault, is_certain=True)
            values = {prop.name: prop.val for prop in entry.propSet or ()}
            lacking = (f"{path} ({type(fault).__name__.rpartition('.')[2]})" for path, fault in faults)
            yield FoundObject(entry.obj, values, tuple(lacking))
        page = collector.ContinueRetrievePropertiesEx(page.token) if page.token else None


def properties(content: vim.ServiceInstanceContent, references: Sequence[object], *paths: str) -> list[FoundObject]:
    """Return properties of some objects of one type; raises BackEndError."""
    if not references:
        return []
    kind = type(references[0])
    spec = Collector.FilterSpec(
        objectSet=[Collector.ObjectSpec(obj=reference) for reference in references],
        propSet=[Collector.PropertySpec(type=kind, pathSet=list(paths))],
    )
    return list(collected(content, spec))


def vgpus(devices: Sequence[object]) -> list[tuple[vim.vm.device.VirtualPCIPassthrough, str]]:
    """Return the vGPUs among a VM's devices, each with its type."""
    return [
        (device, device.backing.vgpu or "")
        for device in devices
        if isinstance(device, vim.vm.device.VirtualPCIPassthrough)
        and isinstance(device.backing, vim.vm.device.VirtualPCIPassthrough.VmiopBackingInfo)
    ]


def vgpu_types(devices: Sequence[object]) -> tuple[str, ...]:
    """Return the types of the vGPUs among a VM's devices."""
    return tuple(name for _, name in vgpus(devices))


# All VMs of a vCenter that the user may see.
POWER = {"poweredOn": Power.ON, "poweredOff": Power.OFF, "suspended": Power.SUSPENDED}
POWER_STATE, CONNECTION, KEY = "runtime.powerState", "runtime.connectionState", "config.instanceUuid"
DEVICES, VERSION = "config.hardware.device", "config.changeVersion"
VM_PATHS = ("name", "config.uuid", KEY, POWER_STATE, CONNECTION, VERSION)
TASK_PATHS = ("info.state", "info.entity")
UNFINISHED = frozenset({"queued", "running"})


class Reader:
    """Reads the VMs of one vCenter; several threads use it at once.

    A VM's devices are most of what there is to read of it. They are read again when its configuration has another
    `config.changeVersion`, which each change of it replaces.
    """

    def __init__(self) -> None:
        self._types: Mapping[str, tuple[str, tuple[str, ...]]] = {}
        """The change version of each VM's configuration, with its vGPU types, by the VM's reference."""

    def read(self, content: vim.ServiceInstanceContent) -> list[WorkerVm]:
        """Return all VMs, with their running tasks; raises BackEndError, and faults of pyVmomi."""
        try:
            return self._read(content)
        except vmodl.fault.ManagedObjectNotFound as error:
            # A VM was deleted during the reading, or the session has ended, and the view with it.
            raise BackEndError(Problem.INCOMPLETE, "an object ended during the reading", is_certain=True) from error

    def _read(self, content: vim.ServiceInstanceContent) -> list[WorkerVm]:
        found = _vms_and_tasks(content)
        vms = [entry for entry in found if isinstance(entry.reference, vim.VirtualMachine)]
        busy = {
            str(entry.values.get("info.entity"))
            for entry in found
            if isinstance(entry.reference, vim.Task) and entry.values.get("info.state") in UNFINISHED
        }
        types = self._vgpu_types(content, vms)
        read = (worker_vm(entry, types.get(str(entry.reference), ()), busy) for entry in vms)
        return [vm for vm in read if vm is not None]

    def _vgpu_types(
        self, content: vim.ServiceInstanceContent, vms: Sequence[FoundObject]
    ) -> Mapping[str, tuple[str, ...]]:
        """Return the vGPU types of each VM that has a configuration."""
        versions = {str(vm.reference): version for vm in vms if (version := vm.value(VERSION, str)) is not None}
        known = {vm: entry for vm, entry in self._types.items() if versions.get(vm) == entry[0]}
        unread = [vm.reference for vm in vms if str(vm.reference) in versions.keys() - known.keys()]
        for vm in properties(content, unread, DEVICES):
            name = str(vm.reference)
            known[name] = (versions[name], vgpu_types(vm.value(DEVICES, list) or []))
        self._types = known
        return {vm: types for vm, (_, types) in known.items()}


def _vms_and_tasks(content: vim.ServiceInstanceContent) -> list[FoundObject]:
    if content.viewManager is None:
        raise BackEndError(Problem.INCOMPLETE, "the server has no view manager", is_certain=True)
    view = content.viewManager.CreateContainerView(content.rootFolder, [vim.VirtualMachine], True)
    try:
        return list(collected(content, _spec(view)))
    finally:
        with suppress(Exception):  # the session's end destroys it, too
            view.Destroy()


def _spec(view: vim.view.ContainerView) -> Collector.FilterSpec:
    tasks = Collector.TraversalSpec(type=vim.VirtualMachine, path="recentTask", skip=False)
    vms = Collector.TraversalSpec(type=vim.view.ContainerView, path="view", skip=False, selectSet=[tasks])
    return Collector.FilterSpec(
        objectSet=[Collector.ObjectSpec(obj=view, skip=True, selectSet=[vms])],
        propSet=[
            Collector.PropertySpec(type=vim.VirtualMachine, pathSet=list(VM_PATHS)),
            Collector.PropertySpec(type=vim.Task, pathSet=list(TASK_PATHS)),
        ],
    )


def worker_vm(found: FoundObject, types: tuple[str, ...], busy: set[str]) -> WorkerVm | None:
    """Return a VM; None for one without a configuration: it is being created, or its files are inaccessible."""
    power, key = found.value(POWER_STATE, str), found.value(KEY, str)
    if power is None or (key is None and found.missing):
        # A VM always has a state. It is missing from the answers of a session that has ended.
        lacks = ", ".join(found.missing) or POWER_STATE
        raise BackEndError(Problem.INCOMPLETE, f"{found.reference} lacks {lacks}", is_certain=True)
    if key is None:
        return None
    # unknown: a vCenter shows the last known state of a VM whose host it has lost.
    is_known = found.value(CONNECTION, str) == "connected" and power in POWER
    return WorkerVm(
        key=VmKey(key),
        name=found.value("name", str) or "",
        system_uuid=(found.value("config.uuid", str) or "").lower(),
        power=POWER[power] if is_known else Power.UNKNOWN,
        vgpu_types=types,
        is_changing=not is_known or str(found.reference) in busy,
    )


FAILS_WITHIN_S = 2.0
"""How long a task is watched. What a vCenter refuses for lack of a GPU fails as a task, within moments."""
POLL_S = 0.1
POSSIBLE = Ability(True)


def make(content: vim.ServiceInstanceContent, call: Call) -> None:
    """Make a call; raises BackEndError. Return when its task has ended, or runs for some time without failing."""
    try:
        vm = vm_of(content, call.vm)
        spec = _with_type(content, vm, call.vgpu_type) if call.action is Action.SET_VGPU_TYPE else None
    except BackEndError:
        raise
    except Exception as error:
        raise problem_of(error, is_certain=True) from error
    try:
        task = _begun(vm, call.action, spec)
    except Exception as error:
        raise problem_of(error, is_certain=False) from error
    if task is not None:
        _watch(content, task)


def vm_of(content: vim.ServiceInstanceContent, key: VmKey) -> vim.VirtualMachine:
    """Return a VM by its instanceUuid; raises BackEndError, and faults of pyVmomi."""
    found = content.searchIndex.FindByUuid(None, key, True, True) if content.searchIndex is not None else None
    if not isinstance(found, vim.VirtualMachine):
        raise BackEndError(Problem.VM_MISSING, f"no VM has the instanceUuid {key}", is_certain=True)
    return found


def _begun(vm: vim.VirtualMachine, action: Action, spec: vim.vm.ConfigSpec | None) -> vim.Task | None:
    """Begin an action, and return its task; a guest's shutdown has none."""
    task: vim.Task | None = None
    match action:
        case Action.SUSPEND:
            task = vm.SuspendVM_Task()
        case Action.SHUT_DOWN:
            vm.ShutdownGuest()
        case Action.POWER_OFF:
            task = vm.PowerOffVM_Task()
        case Action.START:
            task = vm.PowerOnVM_Task(None)
        case Action.SET_VGPU_TYPE:
            task = vm.ReconfigVM_Task(spec)
    return task


def _with_type(content: vim.ServiceInstanceContent, vm: vim.VirtualMachine, vgpu_type: str) -> vim.vm.ConfigSpec:
    """Return the change that gives the one vGPU of a VM another type."""
    (found,) = properties(content, [vm], "config.hardware.device")
    devices = [device for device, _ in vgpus(found.value("config.hardware.device", list) or [])]
    if len(devices) != 1:
        raise BackEndError(Problem.NOT_ONE_VGPU, f"the VM has {len(devices)} vGPUs", is_certain=True)
    devices[0].backing = vim.vm.device.VirtualPCIPassthrough.VmiopBackingInfo(vgpu=vgpu_type)
    change = vim.vm.device.VirtualDeviceSpec(operation="edit", device=devices[0])
    return vim.vm.ConfigSpec(deviceChange=[change])


def _watch(content: vim.ServiceInstanceContent, task: vim.Task) -> None:
    """Raise the error with which a task ends soon. A task that can't be read has begun all the same."""
    pause, until_s = threading.Event(), monotonic() + FAILS_WITHIN_S
    while monotonic() < until_s:
        state, error = _state(content, task)
        if state == "error":
            raise problem_of(error if error is not None else vim.fault.VimFault(), is_certain=False)
        if state == "success":
            return
        pause.wait(POLL_S)


def _state(content: vim.ServiceInstanceContent, task: vim.Task) -> tuple[str | None, Exception | None]:
    with suppress(Exception):
        (found,) = properties(content, [task], "info.state", "info.error")
        return found.value("info.state", str), found.value("info.error", vmodl.MethodFault)
    return None, None


HOST, DEVICES, TOOLS = "runtime.host", "config.hardware.device", "guest.toolsRunningStatus"
CAPABILITIES, TYPES = "config.sharedGpuCapabilities", "config.sharedPassthruGpuTypes"


class HostGpus(msgspec.Struct, frozen=True):
    """The vGPU types that a host reports, with their capabilities."""

    types: frozenset[str]
    capabilities: Mapping[str, vim.host.SharedGpuCapabilities]


def check(content: vim.ServiceInstanceContent, keys: Sequence[VmKey]) -> list[Abilities]:
    """Return the possible actions on these VMs, without VMs that do not exist. Raises BackEndError."""
    known = dict(_existing(content, keys))
    found = {str(entry.reference): entry for entry in properties(content, [*known.values()], HOST, DEVICES, TOOLS)}
    hosts = {str(host): host for entry in found.values() if (host := entry.values.get(HOST)) is not None}
    gpus = {str(entry.reference): _gpus(entry) for entry in properties(content, [*hosts.values()], CAPABILITIES, TYPES)}
    return [
        abilities(key, entry, gpus.get(str(entry.values.get(HOST))))
        for key, vm in known.items()
        if (entry := found.get(str(vm))) is not None
    ]


def _existing(content: vim.ServiceInstanceContent, keys: Sequence[VmKey]) -> Iterator[tuple[VmKey, vim.VirtualMachine]]:
    for key in keys:
        try:
            yield key, vm_of(content, key)
        except BackEndError as error:
            if error.problem is not Problem.VM_MISSING:
                raise


def _gpus(host: FoundObject) -> HostGpus:
    capabilities = host.value(CAPABILITIES, list) or []
    return HostGpus(
        frozenset(host.value(TYPES, list) or []), {capability.vgpu: capability for capability in capabilities}
    )


def abilities(key: VmKey, vm: FoundObject, host: HostGpus | None) -> Abilities:
    """Return the possible actions on one VM; `host` is None while it is on no host, or its host is unknown."""
    types = vgpu_types(vm.value(DEVICES, list) or [])
    lacking = [name for name in types if host is None or name not in host.types]
    elsewhere = Ability(None, Problem.TYPE_MISSING, f"its host does not offer {', '.join(lacking)}; another one may")
    not_one = Ability(False, Problem.NOT_ONE_VGPU, f"the VM has {len(types)} vGPUs")
    tools = vm.value(TOOLS, str)
    # Tools do not run in a VM that is off or suspended, so nothing is known of those.
    no_tools = Ability(None, Problem.TOOLS_MISSING, f"{TOOLS} is {tools or 'not known'}")
    return Abilities(
        key,
        _suspend(types, host),
        POSSIBLE if tools == "guestToolsRunning" else no_tools,
        elsewhere if lacking else POSSIBLE,
        POSSIBLE if len(types) == 1 else not_one,
        tuple(_remarks(types, host)),
    )


def _suspend(types: Sequence[str], host: HostGpus | None) -> Ability:
    for name in types:
        capability = host.capabilities.get(name) if host is not None else None
        if capability is None:
            return Ability(None, Problem.TYPE_MISSING, f"its host reports nothing about the vGPU type {name}")
        if not capability.suspendSupported:
            return Ability(False, Problem.NO_SUSPEND, f"its host says suspendSupported: false of the type {name}")
    return POSSIBLE


def _remarks(types: Sequence[str], host: HostGpus | None) -> Iterator[str]:
    for name in dict.fromkeys(types):
        if host is not None and (capability := host.capabilities.get(name)) is not None:
            yield f"migration with {name}: {'yes' if capability.migrateSupported else 'no'}"
            yield f"snapshots with memory with {name}: {'yes' if capability.memorySnapshotSupported else 'no'}"


class VSphere:
    """The client of one vCenter, or of one ESX host."""

    def __init__(self, server: str, ca: str, user: str, password: str) -> None:
        """Connect to nothing yet."""
        self._session = VsphereSession(server, ca, user, password)
        self._reader = Reader()

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs that the user may see; raises BackEndError."""
        return self._session.run(_asking(self._reader.read))

    def make(self, call: Call) -> None:
        """Make a call; raises BackEndError."""
        self._session.run(lambda content: make(content, call))

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return the possible actions on these VMs; raises BackEndError."""
        return self._session.run(_asking(lambda content: check(content, vms)))


def _asking(ask: Callable[[vim.ServiceInstanceContent], T]) -> Callable[[vim.ServiceInstanceContent], T]:
    """Return a function that changes nothing, whose errors are BackEndErrors."""

    def asked(content: vim.ServiceInstanceContent) -> T:
        try:
            return ask(content)
        except BackEndError:
            raise
        except Exception as error:
            raise problem_of(error, is_certain=True) from error

    return asked
