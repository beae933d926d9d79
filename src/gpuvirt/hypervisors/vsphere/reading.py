"""All VMs of a vCenter that the user may see."""

from pyVmomi import vim

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.hypervisors.vsphere.properties import Collector, Found, collected, vgpu_types
from gpuvirt.model.schedules.hypervisor import Power, VmKey, WorkerVm

POWER = {"poweredOn": Power.ON, "poweredOff": Power.OFF, "suspended": Power.SUSPENDED}
POWER_STATE, CONNECTION, KEY = "runtime.powerState", "runtime.connectionState", "config.instanceUuid"
DEVICES = "config.hardware.device"
VM_PATHS = ("name", "config.uuid", KEY, POWER_STATE, CONNECTION, DEVICES)
TASK_PATHS = ("info.state", "info.entity")
UNFINISHED = frozenset({"queued", "running"})


def read(content: vim.ServiceInstanceContent) -> list[WorkerVm]:
    """Return all VMs, with their running tasks, from one request; raises BackEndError, and faults of pyVmomi."""
    if content.viewManager is None:
        raise BackEndError(Problem.INCOMPLETE, "the server has no view manager", is_certain=True)
    view = content.viewManager.CreateContainerView(content.rootFolder, [vim.VirtualMachine], True)
    try:
        found = list(collected(content, _spec(view)))
    finally:
        view.Destroy()
    busy = {
        str(entry.values.get("info.entity"))
        for entry in found
        if isinstance(entry.reference, vim.Task) and entry.values.get("info.state") in UNFINISHED
    }
    vms = (_vm(entry, busy) for entry in found if isinstance(entry.reference, vim.VirtualMachine))
    return [vm for vm in vms if vm is not None]


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


def _vm(found: Found, busy: set[str]) -> WorkerVm | None:
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
    devices = found.value(DEVICES, list) or []
    return WorkerVm(
        key=VmKey(key),
        name=found.value("name", str) or "",
        system_uuid=(found.value("config.uuid", str) or "").lower(),
        power=POWER[power] if is_known else Power.UNKNOWN,
        vgpu_types=vgpu_types(devices),
        is_changing=not is_known or str(found.reference) in busy,
    )
