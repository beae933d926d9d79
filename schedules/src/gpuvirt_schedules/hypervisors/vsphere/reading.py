"""All VMs of a vCenter that the user may see."""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from pyVmomi import vim, vmodl

from gpuvirt.model.workers.hypervisor import Power, VmKey, WorkerVm
from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import Problem
from gpuvirt_schedules.hypervisors.vsphere.properties import Collector, FoundObject, collected, properties, vgpu_types

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
