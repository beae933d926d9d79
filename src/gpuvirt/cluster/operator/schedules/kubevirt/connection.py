"""The back end of KubeVirt: the API server of the same cluster, so that no child and no credentials are needed.

A write names the version that was read, so that a late one is refused if the VM has changed; `Client.leading` sends
none without the lease. Only taking the power has no such precondition.
"""

from collections.abc import Iterable, Mapping

from gpuvirt.cluster.client import Client
from gpuvirt.cluster.collection import Collection
from gpuvirt.cluster.failures import (
    NOT_MADE,
    ApiError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnauthorizedError,
)
from gpuvirt.cluster.operator.logline import logged
from gpuvirt.cluster.operator.schedules.kubevirt import judging
from gpuvirt.cluster.operator.schedules.kubevirt.changing import Writer
from gpuvirt.cluster.operator.schedules.kubevirt.judging import VmObjects
from gpuvirt.cluster.operator.schedules.kubevirt.virtualmachines import Vm, Vmi, instances, virtual_machines
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import hypervisorproblems as problems
from gpuvirt.model.schedules.hypervisor import (
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


class KubeVirtVms:
    """The VirtualMachines of one namespace. No method raises: errors are answers."""

    def __init__(self, client: Client, namespace: str) -> None:
        """Writes of `client` are sent with the lease alone (`Client.leading`)."""
        self._client = client
        self._namespace = namespace
        self._server = f"KubeVirt in namespace {namespace}"
        self._writer = Writer(client, namespace)

    async def read(self) -> VmsReading:
        """Return all VMs of the namespace."""
        found = await self.objects()
        if isinstance(found, Reason):
            return VmsUnknown(found.code, found.text)
        return {key: judging.worker_vm(objects) for key, objects in found.items()}

    async def call(self, call: Call) -> Answer:
        """Make one call for the VM as it is now. The caller holds the lease at this moment."""
        found = await self.objects()
        if isinstance(found, Reason):
            return Refused(found.code, found.text)
        objects = found.get(call.vm)
        if objects is None:
            missing = problems.vm_not_found(self._server, "")
            return Refused(missing.code, missing.text)
        refusal = judging.refusal(self._server, call.action, objects)
        if refusal is not None:
            return Refused(refusal.code, refusal.text)
        try:
            await self._make(call, objects)
        except ApiError as error:
            return self._answer(error)
        return Accepted()

    async def check(self, vms: Iterable[VmKey]) -> Mapping[VmKey, Abilities] | VmsUnknown:
        """Return what can be done with each of these VMs. VMs that do not exist are missing."""
        found = await self.objects()
        if isinstance(found, Reason):
            return VmsUnknown(found.code, found.text)
        return {key: judging.abilities(self._server, found[key]) for key in vms if key in found}

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
            return problems.kubevirt_missing(self._server, logged(str(error)))
        except ApiError as error:
            return self._reason(error)
        by_name = {vmi.metadata.name: vmi for vmi in vmis}
        return {VmKey(vm.metadata.uid): VmObjects(vm, by_name.get(vm.metadata.name)) for vm in vms}

    async def _make(self, call: Call, objects: VmObjects) -> None:
        match call.action:
            case Action.SHUT_DOWN:
                await self._writer.shut_down(objects)
            case Action.POWER_OFF:
                await self._writer.power_off(objects)
            case Action.START:
                await self._writer.start(objects)
            case Action.SET_VGPU_TYPE:
                await self._writer.set_vgpu_type(objects, call.vgpu_type)
            case Action.SUSPEND:
                pass  # refused before

    def _answer(self, error: ApiError) -> Answer:
        reason = self._reason(error)
        is_certain = isinstance(error, (*NOT_MADE, ConflictError))
        return (Refused if is_certain else OutcomeUnknown)(reason.code, reason.text)

    def _reason(self, error: ApiError) -> Reason:
        """Return the reason for an error of the API server, at which KubeVirt's kinds may be missing."""
        text = logged(str(error))
        match error:
            case ConflictError():
                return problems.wrong_power_state(self._server, text)
            case NotFoundError():
                return problems.vm_not_found(self._server, text)
            case ForbiddenError() | UnauthorizedError():
                return problems.kubevirt_forbidden(self._server, text)
            case _:
                return problems.call_failed(self._server, text)
