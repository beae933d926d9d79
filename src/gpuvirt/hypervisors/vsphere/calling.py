"""Calls that change a VM of a vCenter."""

import threading
from contextlib import suppress
from time import monotonic  # noqa: TID251  how long to wait for a task, in a process of its own

from pyVmomi import vim, vmodl

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.hypervisors.vsphere.faults import problem_of
from gpuvirt.hypervisors.vsphere.properties import properties, vgpus
from gpuvirt.model.schedules.hypervisor import Action, Call, VmKey

FAILS_WITHIN_S = 2.0
"""How long a task is watched. What a vCenter refuses for lack of a GPU fails as a task, within moments."""
POLL_S = 0.1


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
