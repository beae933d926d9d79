"""The writes that carry out a call: each for the version of the VM that was read.

Source: KubeVirt's pkg/virt-api/rest/lifecycle.go, which makes the same changes for `virtctl start` and `virtctl stop`.
"""

import msgspec

from gpuvirt.cluster.client import Client, PatchType
from gpuvirt.cluster.operator.schedules.kubevirt.judging import BY_REQUEST, VmObjects
from gpuvirt.cluster.operator.schedules.kubevirt.virtualmachines import (
    RUNNING,
    StateChange,
    Vm,
    subresources,
    virtual_machines,
)
from gpuvirt.model.schedules.spec import SAVED_STRATEGY

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


class Writer:
    """Writes to the VMs of a namespace. All methods raise ApiError."""

    def __init__(self, client: Client, namespace: str) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`)."""
        self._client = client
        self._namespace = namespace

    async def shut_down(self, objects: VmObjects) -> None:
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

    async def start(self, objects: VmObjects) -> None:
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

    async def power_off(self, objects: VmObjects) -> None:
        """Take the power of a VM that is shutting down, by virt-api, which alone may shorten its grace period."""
        await self._client.update_part(
            subresources(self._namespace), objects.vm.metadata.name, "stop", _StopOptions(grace_period=0)
        )

    async def set_vgpu_type(self, objects: VmObjects, name: str) -> None:
        """Give a VM with one GPU another vGPU type."""
        vm = objects.vm
        before = vm.spec.template.spec.domain.devices.gpus[0].device_name
        operations = (
            _Operation("test", "/metadata/uid", vm.metadata.uid),
            _Operation("replace", "/metadata/resourceVersion", vm.metadata.resource_version),
            _Operation("test", TYPE_PATH, before),
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
