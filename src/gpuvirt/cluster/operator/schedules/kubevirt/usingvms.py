"""Which VMs are the users of GPUs, by their pods and VMIs, and whether each may be stopped. Nothing is asked here.

Source: KubeVirt's pkg/virt-controller/services/template.go: the VMI controls the pod `virt-launcher`; watch/vm/vm.go:
the VirtualMachine controls the VMI.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from gpuvirt.cluster.labelselector import LabelSelector
from gpuvirt.cluster.operator.schedules.kubevirt import judging
from gpuvirt.cluster.operator.schedules.kubevirt.blockedgpus import WaitingGpu
from gpuvirt.cluster.operator.schedules.kubevirt.judging import BY_STRATEGY, VmObjects
from gpuvirt.cluster.operator.schedules.kubevirt.virtualmachines import OwnedMetadata
from gpuvirt.model.reasons import Reason
from gpuvirt.model.reasons import nodevms as reasons
from gpuvirt.model.schedules.hypervisor import VmKey
from gpuvirt.model.schedules.nodevms import BlockedGpu, SeenVm, SeenVms

POD, VMI, VM = "pod ", "VirtualMachineInstance", "VirtualMachine"


class LauncherPod(msgspec.Struct, frozen=True):
    """A pod that may run a VM."""

    metadata: OwnedMetadata

    @property
    def where(self) -> str:
        """Its namespace and name: `default/virt-launcher-vm-1-abcde`."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _BudgetSpec(msgspec.Struct, frozen=True):
    selector: LabelSelector | None = None


class _BudgetStatus(msgspec.Struct, frozen=True, rename="camel"):
    disruptions_allowed: int = 0


class Budget(msgspec.Struct, frozen=True):
    """A PodDisruptionBudget."""

    metadata: OwnedMetadata
    spec: _BudgetSpec = _BudgetSpec()
    status: _BudgetStatus = _BudgetStatus()

    def covers(self, pod: LauncherPod) -> bool:
        """Return whether a disruption of a pod counts. A VMI's own budget forbids evictions, and no shutdown."""
        selector, is_own = self.spec.selector, bool(self.metadata.controller_uid(VMI))
        if is_own or selector is None or self.metadata.namespace != pod.metadata.namespace:
            return False
        return selector.matches(pod.metadata.labels)


@dataclass(frozen=True, slots=True)
class Read:
    """What one round has read."""

    pods: Mapping[str, LauncherPod]
    """The pods of the nodes, by namespace and name."""
    vms: Mapping[str, Mapping[VmKey, VmObjects] | Reason]
    """The VMs of each namespace, or why they are unknown."""
    budgets: tuple[Budget, ...] | None
    """None if they may not be listed."""
    workers: frozenset[str] = frozenset()
    """The namespaces in which schedules have their workers."""


def seen_vms(read: Read, gpus: Iterable[WaitingGpu]) -> SeenVms:
    """Return the VMs of all namespaces, and for each GPU which of them are its users."""
    blocked, pods = list[BlockedGpu](), dict[VmKey, list[LauncherPod]]()
    for gpu in gpus:
        vms, others = list[VmKey](), list(gpu.obstacles)
        for user in gpu.users:
            pod = read.pods.get(user.removeprefix(POD)) if user.startswith(POD) else None
            found = _vm_of(pod, read) if pod is not None else user
            if isinstance(found, VmObjects) and pod is not None:
                key = VmKey(found.vm.metadata.uid)
                vms.append(key)
                pods.setdefault(key, []).append(pod)
            elif isinstance(found, str):
                others.append(found)
        blocked.append(BlockedGpu(gpu.node, gpu.address, tuple(dict.fromkeys(vms)), tuple(others)))
    objects = {key: vm for found in read.vms.values() if not isinstance(found, Reason) for key, vm in found.items()}
    seen = {key: _seen(vm, pods.get(key, ()), read) for key, vm in objects.items()}
    unknown = {name: found for name, found in read.vms.items() if isinstance(found, Reason)}
    return SeenVms(seen, unknown, tuple(blocked))


def _vm_of(pod: LauncherPod, read: Read) -> VmObjects | str:
    """Return the VM that a pod runs; in words what else it is."""
    vmi = pod.metadata.controller_uid(VMI)
    if not vmi:
        return f"{POD}{pod.where}"
    found = read.vms.get(pod.metadata.namespace)
    if isinstance(found, Reason):
        return f"{POD}{pod.where}, whose VM is not known: {found.text}"
    for objects in (found or {}).values():
        metadata = objects.vmi.metadata if objects.vmi is not None else None
        if metadata is not None and metadata.uid == vmi and metadata.controller_uid(VM) == objects.vm.metadata.uid:
            return objects
    return f"{POD}{pod.where}, whose VMI belongs to no VirtualMachine"


def _seen(objects: VmObjects, pods: Iterable[LauncherPod], read: Read) -> SeenVm:
    vm = objects.vm
    covering = [budget for budget in read.budgets or () if any(budget.covers(pod) for pod in pods)]
    off = VmObjects(vm, None)
    is_kept_running = vm.spec.strategy in BY_STRATEGY and objects.is_on
    return SeenVm(
        VmKey(vm.metadata.uid),
        vm.metadata.namespace,
        vm.metadata.name,
        objects.is_on,
        judging.is_changing(objects),
        vm.spec.strategy == "Halted",
        next(_refusals(objects, read), None),
        # A schedule halts a VM of these strategies, and starts it again by them.
        None if is_kept_running else judging.start_refusal(_server(vm.metadata.namespace), off),
        {f"{found.metadata.namespace}/{found.metadata.name}": found.status.disruptions_allowed for found in covering},
    )


def _refusals(objects: VmObjects, read: Read) -> Iterator[Reason]:
    """Yield why a VM must not be stopped."""
    metadata = objects.vm.metadata
    where = f"{metadata.namespace}/{metadata.name}"
    if metadata.namespace in read.workers:
        yield reasons.vm_not_stopped(where, "its namespace has the workers of a schedule, whose pods would end with it")
    if metadata.controller is not None:
        yield reasons.vm_not_stopped(where, f"a {metadata.controller.kind} controls it")
    if read.budgets is None:
        yield reasons.vm_not_stopped(where, "PodDisruptionBudgets may not be listed, so none is known to allow it")
    refusal = judging.shutdown_refusal(_server(metadata.namespace), objects)
    if refusal is not None:
        yield reasons.vm_not_stopped(where, refusal.text)


def _server(namespace: str) -> str:
    return f"KubeVirt in namespace {namespace}"
