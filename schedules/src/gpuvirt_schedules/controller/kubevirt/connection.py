"""The back end of KubeVirt: the API server of the same cluster, so that no child and no credentials are needed.

A write names the version that was read, so that a late one is refused if the VM has changed; `Client.leading` sends
none without the lease. Only taking the power has no such precondition (`VmWriter`). Source: KubeVirt's
pkg/virt-api/rest/lifecycle.go, which makes the same changes for `virtctl start` and `virtctl stop`. Its subresources
have no precondition, and `start` turns each halted VM into `Always`.
"""

from collections.abc import Iterable, Mapping

import msgspec

from gpuvirt.controller.writer import logged
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import NOT_MADE, ApiError, ConflictError, ForbiddenError, NotFoundError, UnauthorizedError
from gpuvirt.kube.kinds.kubevirt import StateChange, Vm, Vmi
from gpuvirt.kube.resources import Collection
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.reasons.schedules import hypervisor_problem
from gpuvirt.model.workers.hypervisor import (
    Abilities,
    Accepted,
    Action,
    Answer,
    Call,
    OutcomeUnknown,
    Refused,
    VmKey,
    VmsReading,
    VmsUnknown,
)
from gpuvirt.model.workers.spec import SAVED_STRATEGY
from gpuvirt_schedules.controller.kubevirt import virtualmachines
from gpuvirt_schedules.controller.kubevirt.virtualmachines import (
    BY_REQUEST,
    VmObjects,
    instances,
    subresources,
    virtual_machines,
)

RUNNING = "running"
TYPE_PATH = "/spec/template/spec/domain/devices/gpus/0/deviceName"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    annotations: dict[str, str | None] | msgspec.UnsetType = msgspec.UNSET


class _Strategy(msgspec.Struct, frozen=True, rename="camel"):
    running: bool | msgspec.UnsetType = msgspec.UNSET
    run_strategy: str | msgspec.UnsetType = msgspec.UNSET


class _SpecPatch(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Strategy


class _Requests(msgspec.Struct, frozen=True, rename="camel"):
    state_change_requests: tuple[StateChange, ...]


class _StatusPatch(msgspec.Struct, frozen=True):
    metadata: _Metadata
    status: _Requests


class _Operation(msgspec.Struct, frozen=True):
    op: str
    path: str
    value: str


class _StopOptions(msgspec.Struct, frozen=True, rename="camel"):
    grace_period: int


class VmWriter:
    """Writes to the VMs of a namespace. All methods raise ApiError."""

    def __init__(self, client: Client, namespace: str) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`)."""
        self._client = client
        self._namespace = namespace

    async def make(self, call: Call, objects: VmObjects) -> None:
        """Make a call for the VM of its proof, which `objects` show."""
        match call.action:
            case Action.SHUT_DOWN:
                await self._shut_down(objects)
            case Action.POWER_OFF:
                await self._power_off(objects)
            case Action.START:
                await self._start(objects)
            case Action.SET_VGPU_TYPE:
                await self._set_vgpu_type(objects, call.vgpu_type)
            case Action.SUSPEND:
                pass  # refused before

    async def _shut_down(self, objects: VmObjects) -> None:
        """Ask a guest to end. A VM that was asked already stays as it is."""
        vm, vmi, strategy = objects.vm, objects.vmi, objects.vm.spec.strategy
        if strategy == "Halted" or vmi is None or vmi.metadata.deletion_timestamp:
            return
        if strategy in BY_REQUEST:
            await self._request(vm, StateChange("Stop", vmi.metadata.uid))
        elif vm.spec.running:
            await self._patch(vm, _Strategy(running=False), RUNNING)
        else:
            await self._patch(vm, _Strategy(run_strategy="Halted"), strategy)

    async def _start(self, objects: VmObjects) -> None:
        """Start a VM by the strategy that it had, or by a request."""
        vm, vmi = objects.vm, objects.vmi
        if vm.spec.strategy in BY_REQUEST:
            ended = (StateChange("Stop", vmi.metadata.uid),) if vmi is not None else ()
            await self._request(vm, *ended, StateChange("Start"))
        elif vm.saved != RUNNING:
            await self._patch(vm, _Strategy(run_strategy=vm.saved), None)
        elif vm.spec.running is not None:
            await self._patch(vm, _Strategy(running=True), None)
        else:  # an admin has replaced `running`, which excludes `runStrategy`
            await self._patch(vm, _Strategy(run_strategy="Always"), None)

    async def _power_off(self, objects: VmObjects) -> None:
        """Take the power of a VM that is shutting down, by virt-api, which alone may shorten its grace period.

        virt-api finds VM and VMI by name, and its StopOptions have no precondition, so the last requests before this
        one have compared their UIDs with the proof. A window of milliseconds remains: if the VM is deleted, created
        with the same name and started before virt-api reads it, the new VM loses its power. Deleting the VMI by its UID
        is no way out: it is being deleted already, and no second deletion shortens its grace period. Nor is a forced
        deletion of its pod: the GPU would count as free while QEMU still runs.
        """
        await self._client.update_part(
            subresources(self._namespace), objects.vm.metadata.name, "stop", _StopOptions(grace_period=0)
        )

    async def _set_vgpu_type(self, objects: VmObjects, name: str) -> None:
        """Give a VM with one GPU another vGPU type."""
        vm = objects.vm
        gpu = (vm.spec.template.spec.domain.devices.gpus or ())[0]
        operations = (
            _Operation("test", "/metadata/uid", vm.metadata.uid),
            _Operation("replace", "/metadata/resourceVersion", vm.metadata.resource_version),
            _Operation("test", TYPE_PATH, gpu.device_name or ""),
            _Operation("replace", TYPE_PATH, name),
        )
        await self._client.patch(virtual_machines(self._namespace), vm.metadata.name, operations, PatchType.JSON, Vm)

    async def _patch(self, vm: Vm, spec: _Strategy, saved: str | None) -> None:
        patch = _SpecPatch(_Metadata(vm.metadata.resource_version, {SAVED_STRATEGY: saved}), spec)
        await self._client.patch(virtual_machines(self._namespace), vm.metadata.name, patch, PatchType.MERGE, Vm)

    async def _request(self, vm: Vm, *changes: StateChange) -> None:
        patch = _StatusPatch(_Metadata(vm.metadata.resource_version), _Requests(changes))
        await self._client.patch(
            virtual_machines(self._namespace), vm.metadata.name, patch, PatchType.MERGE, Vm, part="status"
        )


def server_of(namespace: str) -> str:
    """Return the name of a namespace's KubeVirt in reasons."""
    return f"KubeVirt in namespace {namespace}"


class KubeVirtVms:
    """The VirtualMachines of one namespace. No method raises: errors are answers."""

    def __init__(self, client: Client, namespace: str) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`)."""
        self._client = client
        self._namespace = namespace
        self._server = server_of(namespace)
        self._writer = VmWriter(client, namespace)

    async def read(self) -> VmsReading:
        """Return all VMs of the namespace."""
        found = await self.objects()
        if isinstance(found, Reason):
            return VmsUnknown(found.code, found.text)
        return {key: virtualmachines.worker_vm(objects) for key, objects in found.items()}

    async def call(self, call: Call) -> Answer:
        """Make one call for the VM as it is now, if it still runs as the VMI of the proof.

        The caller holds the lease at this moment.
        """
        found = await self.objects()
        if isinstance(found, Reason):
            return Refused(found.code, found.text)
        objects = found.get(call.vm)
        if objects is None:
            missing = hypervisor_problem(ReasonCode.VM_NOT_FOUND, self._server, "")
            return Refused(missing.code, missing.text)
        refusal = virtualmachines.refusal(self._server, call, objects)
        if refusal is not None:
            return Refused(refusal.code, refusal.text)
        try:
            await self._writer.make(call, objects)
        except ApiError as error:
            reason = self._reason(error)
            is_certain = isinstance(error, (*NOT_MADE, ConflictError))
            return (Refused if is_certain else OutcomeUnknown)(reason.code, reason.text)
        return Accepted()

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with each of these VMs. VMs that do not exist are missing."""
        found = await self.objects()
        if isinstance(found, Reason):
            return VmsUnknown(found.code, found.text)
        return {key: virtualmachines.abilities(self._server, found[key]) for key in vms if key in found}

    async def close(self) -> None:
        """Do nothing: the connections are the client's, which delivers no write after the end of its lease."""

    async def objects(self) -> Mapping[VmKey, VmObjects] | Reason:
        """Return the VMs with their VMIs, or why they are unknown.

        VMs are read first: a VM that no VMI follows is off, while a VMI that is missing may be about to be created.
        """
        try:
            vms = (await self._client.list(Collection(virtual_machines(self._namespace), Vm))).items
            vmis = (await self._client.list(Collection(instances(self._namespace), Vmi))).items
        except NotFoundError as error:
            return Reason(
                ReasonCode.BACK_END_MISSING,
                f"the hypervisor {self._server}",
                "is not installed: there are no VirtualMachines",
                (Seen("", logged(str(error))),),
                "install KubeVirt in this cluster, or correct spec.hypervisor of the schedule",
            )
        except ApiError as error:
            return self._reason(error)
        by_name = {vmi.metadata.name: vmi for vmi in vmis}
        return {VmKey(vm.metadata.uid): VmObjects(vm, by_name.get(vm.metadata.name)) for vm in vms}

    def _reason(self, error: ApiError) -> Reason:
        """Return the reason for an error of the API server, at which KubeVirt's kinds may be missing."""
        text = logged(str(error))
        match error:
            case ConflictError():
                return hypervisor_problem(ReasonCode.WRONG_POWER_STATE, self._server, text)
            case NotFoundError():
                return hypervisor_problem(ReasonCode.VM_NOT_FOUND, self._server, text)
            case ForbiddenError() | UnauthorizedError():
                return Reason(
                    ReasonCode.HYPERVISOR_FORBIDDEN,
                    f"the hypervisor {self._server}",
                    "denies the request to gpuvirt",
                    (Seen("", text),),
                    "add the namespace to schedule.kubeVirtNamespaces of the chart",
                )
            case _:
                return hypervisor_problem(ReasonCode.HYPERVISOR_CALL_FAILED, self._server, text)
