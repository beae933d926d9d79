"""VirtualMachines and their VMIs, with the fields that a schedule reads, their state, and the calls that they permit.

Nothing is asked here. Source: KubeVirt's API `kubevirt.io/v1` (staging/src/kubevirt.io/api/core/v1/types.go), its
pkg/virt-controller/watch/vm (`syncRunStrategy`, firmware.go) and pkg/virt-api/rest/lifecycle.go.
"""

from collections.abc import Iterator
from uuid import UUID, uuid5

import msgspec

from gpuvirt.kube.kinds.core import OwnedMetadata
from gpuvirt.kube.kinds.kubevirt import Devices, Vm, Vmi, VmiSpec
from gpuvirt.kube.resources import Resource
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons.schedules import hypervisor_problem
from gpuvirt.model.workers.hypervisor import Abilities, Ability, Action, Call, Power, VmKey, WorkerVm

GROUP = "kubevirt.io"
VM = "VirtualMachine"


def controller_uid(metadata: OwnedMetadata, kind: str) -> str:
    """Return the uid of an object's controller if it is one of KubeVirt's objects of this kind; else an empty text."""
    owner = metadata.controller
    is_one = owner is not None and owner.kind == kind and owner.api_version.startswith(f"{GROUP}/")
    return owner.uid if owner is not None and is_one else ""


def virtual_machines(namespace: str) -> Resource:
    """Return the VirtualMachines of a namespace."""
    return Resource("virtualmachines", GROUP, namespace=namespace)


def instances(namespace: str) -> Resource:
    """Return the VirtualMachineInstances of a namespace."""
    return Resource("virtualmachineinstances", GROUP, namespace=namespace)


def subresources(namespace: str) -> Resource:
    """Return what virt-api serves of the VirtualMachines of a namespace: `stop`."""
    return Resource("virtualmachines", f"subresources.{GROUP}", namespace=namespace)


UUID_NAMESPACE = UUID("6a1a24a1-4061-4607-8bf4-a3963d0c5895")
"""Of the UUID that KubeVirt derives from a VM's name where its firmware has none (firmware.go)."""
BY_REQUEST = frozenset({"Manual", "RerunOnFailure"})
"""Strategies that stay while a VM is stopped and started by requests in its status."""
BY_STRATEGY = frozenset({"Always", "Once"})
"""Strategies that only another strategy ends."""
POSSIBLE = Ability(True)


class VmObjects(msgspec.Struct, frozen=True):
    """A VirtualMachine with its VMI, which was read later; None: it does not exist."""

    vm: Vm
    vmi: Vmi | None

    @property
    def current(self) -> VmiSpec:
        """The spec of the VMI; without a VMI, the spec that the VM's template has for one."""
        return self.vmi.spec if self.vmi is not None else self.vm.spec.template.spec

    @property
    def instance(self) -> str:
        """The UID of the VMI that the VM controls and runs as; empty if there is none. Another's may have its name."""
        vm, vmi = self.vm.metadata, self.vmi
        is_own = vmi is not None and controller_uid(vmi.metadata, VM) == vm.uid
        return vmi.metadata.uid if vmi is not None and is_own and self.is_on else ""

    @property
    def is_on(self) -> bool:
        """Whether a VMI has or gets devices."""
        return self.vmi is not None and not self.vmi.is_final


def worker_vm(objects: VmObjects) -> WorkerVm:
    """Return the VM as schedules know it."""
    vm, vmi = objects.vm, objects.vmi
    firmware = objects.current.domain.firmware
    uuid = firmware.uuid if firmware is not None and firmware.uuid else str(uuid5(UUID_NAMESPACE, vm.metadata.name))
    power = Power.ON if objects.is_on else Power.OFF
    if vmi is not None and vmi.status.phase == "Unknown":  # its node is lost: it may run
        power = Power.UNKNOWN
    return WorkerVm(
        VmKey(vm.metadata.uid),
        vm.metadata.name,
        uuid.lower(),
        power,
        vgpu_types(objects.current.domain.devices),
        power is Power.UNKNOWN or is_changing(objects),
        is_shutting_down(objects),
        f"{vm.metadata.namespace}/{vm.metadata.name}",
        vmi.status.addresses if vmi is not None and objects.instance else (),
        objects.instance,
    )


def vgpu_types(devices: Devices) -> tuple[str, ...]:
    """Return the resources of a VM's GPUs."""
    return tuple(device.device_name or "" for device in (*(devices.gpus or ()), *(devices.host_devices or ())))


def is_shutting_down(objects: VmObjects) -> bool:
    """Return whether the guest was asked to end, and has not yet."""
    vmi = objects.vmi
    return vmi is not None and not vmi.is_final and bool(vmi.metadata.deletion_timestamp)


def is_changing(objects: VmObjects) -> bool:
    """Return whether KubeVirt is still carrying out a change, by a schedule or an admin."""
    vm, vmi, strategy = objects.vm, objects.vmi, objects.vm.spec.strategy
    if vm.metadata.deletion_timestamp or vm.status.state_change_requests:
        return True
    if vmi is None:
        return strategy in {"Always", "Once"} or (strategy == "RerunOnFailure" and vm.status.run_strategy != strategy)
    if vmi.metadata.deletion_timestamp or strategy == "Halted":
        return True
    if vmi.is_final:
        return strategy in {"Always", "RerunOnFailure"}
    migration = vmi.status.migration_state
    if migration is not None and not (migration.completed or migration.failed):
        return True
    # A VM for which no node has room does not change until an admin or a schedule does something.
    return vmi.status.phase != "Running" and vm.status.printable_status != "ErrorUnschedulable"


def refusal(server: str, call: Call, objects: VmObjects) -> Reason | None:
    """Return why a call is not made; None if it may be."""
    action = call.action
    if action is Action.SUSPEND:
        return hypervisor_problem(ReasonCode.SUSPEND_NOT_SUPPORTED, server, "KubeVirt saves no VM to disk")
    if objects.instance != call.proof.instance or objects.is_on is not bool(objects.instance):
        names = [f"VMI {uid}" if uid else "no VMI of its own" for uid in (call.proof.instance, objects.instance)]
        return hypervisor_problem(
            ReasonCode.WRONG_POWER_STATE, server, f"the VM had {names[0]} when it was read, and has {names[1]} now"
        )
    if not _has_state_for(action, objects):
        state = objects.vm.status.printable_status or "not reported"
        return hypervisor_problem(ReasonCode.WRONG_POWER_STATE, server, f"its printableStatus is {state}")
    judges = {
        Action.SHUT_DOWN: shutdown_refusal,
        Action.START: start_refusal,
        Action.SET_VGPU_TYPE: type_refusal,
    }
    judge = judges.get(action)
    return judge(server, objects) if judge is not None else None


def _has_state_for(action: Action, objects: VmObjects) -> bool:
    if action is Action.POWER_OFF:
        return is_shutting_down(objects)
    if action is Action.SHUT_DOWN:
        return is_shutting_down(objects) or (objects.is_on and not is_changing(objects))
    return not objects.is_on and not is_changing(objects)


def shutdown_refusal(server: str, objects: VmObjects) -> Reason | None:
    """Return why a guest can't be asked to shut down; None if it can."""
    strategy = objects.vm.spec.strategy
    if strategy not in BY_REQUEST | BY_STRATEGY | {"Halted"}:
        return hypervisor_problem(
            ReasonCode.HYPERVISOR_REFUSED,
            server,
            f"runStrategy is {strategy}, expected Manual, Always, RerunOnFailure or Once",
        )
    if objects.current.grace_s <= 0:
        text = "terminationGracePeriodSeconds is 0, so KubeVirt powers the VM off at once"
        return hypervisor_problem(ReasonCode.HYPERVISOR_REFUSED, server, text)
    return None


def start_refusal(server: str, objects: VmObjects) -> Reason | None:
    """Return why a VM that is off can't be started; None if it can."""
    vm, strategy = objects.vm, objects.vm.spec.strategy
    if strategy in BY_REQUEST or (strategy == "Halted" and vm.saved):
        return None
    if strategy == "Halted":
        text = "runStrategy is Halted, and not by a schedule; set Manual to have the schedule start the VM"
        return hypervisor_problem(ReasonCode.HYPERVISOR_REFUSED, server, text)
    return hypervisor_problem(
        ReasonCode.WRONG_POWER_STATE,
        server,
        f"runStrategy is {strategy}, with which KubeVirt accepts no request to start; set Manual",
    )


def type_refusal(server: str, objects: VmObjects) -> Reason | None:
    """Return why a VM can't get another vGPU type; None if it can while it is off."""
    devices = objects.vm.spec.template.spec.domain.devices
    gpus, host_devices = len(devices.gpus or ()), len(devices.host_devices or ())
    if gpus == 1 and not host_devices:
        return None
    text = f"spec.template has {gpus} gpus and {host_devices} hostDevices, expected 1 and 0"
    return hypervisor_problem(ReasonCode.NOT_ONE_VGPU, server, text)


def abilities(server: str, objects: VmObjects) -> Abilities:
    """Return what can be done with a VM."""
    no_suspend = hypervisor_problem(
        ReasonCode.SUSPEND_NOT_SUPPORTED, server, "KubeVirt saves no VM to disk; set leave: ShutDown"
    )
    off = VmObjects(objects.vm, None)
    is_kept_running = objects.vm.spec.strategy in BY_STRATEGY
    return Abilities(
        VmKey(objects.vm.metadata.uid),
        _ability(no_suspend),
        _ability(shutdown_refusal(server, objects)),
        # A schedule halts a VM of these strategies, and starts it again by them.
        POSSIBLE if is_kept_running else _ability(start_refusal(server, off)),
        _ability(type_refusal(server, objects)),
        tuple(_remarks(objects)),
    )


def _ability(refusal: Reason | None) -> Ability:
    return POSSIBLE if refusal is None else Ability(False, refusal.code, refusal.text)


def _remarks(objects: VmObjects) -> Iterator[str]:
    yield f"runStrategy: {objects.vm.spec.strategy}"
    yield f"KubeVirt powers the VM off {objects.current.grace_s} s after it has asked the guest to shut down"
    for condition in objects.vmi.status.conditions if objects.vmi is not None else ():
        if condition.type == "LiveMigratable":
            yield f"live migration: {'yes' if condition.status == 'True' else f'no ({condition.reason})'}"
