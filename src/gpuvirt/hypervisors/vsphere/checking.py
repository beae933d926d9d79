"""What can be done with VMs of a vCenter, by what their hosts say of the vGPU types; nothing is changed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyVmomi import vim

from gpuvirt.hypervisors.backend import BackEndError
from gpuvirt.hypervisors.messages import Problem
from gpuvirt.hypervisors.vsphere.calling import vm_of
from gpuvirt.hypervisors.vsphere.properties import Found, properties, vgpu_types
from gpuvirt.model.schedules.hypervisor import Abilities, Ability, VmKey

HOST, DEVICES, TOOLS = "runtime.host", "config.hardware.device", "guest.toolsRunningStatus"
CAPABILITIES, TYPES = "config.sharedGpuCapabilities", "config.sharedPassthruGpuTypes"
POSSIBLE = Ability(True)


@dataclass(frozen=True, slots=True)
class HostGpus:
    """What a host says of vGPU types."""

    types: frozenset[str]
    capabilities: Mapping[str, vim.host.SharedGpuCapabilities]


def check(content: vim.ServiceInstanceContent, keys: Sequence[VmKey]) -> list[Abilities]:
    """Return what can be done with these VMs; those that do not exist are missing. Raises BackEndError."""
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


def _gpus(host: Found) -> HostGpus:
    capabilities = host.value(CAPABILITIES, list) or []
    return HostGpus(
        frozenset(host.value(TYPES, list) or []), {capability.vgpu: capability for capability in capabilities}
    )


def abilities(key: VmKey, vm: Found, host: HostGpus | None) -> Abilities:
    """Return what can be done with one VM; `host` is None while it is on none, or while its host is unknown."""
    types = vgpu_types(vm.value(DEVICES, list) or [])
    return Abilities(
        key, _suspend(types, host), _shut_down(vm), _start(types, host), _set_type(types), tuple(_remarks(types, host))
    )


def _suspend(types: Sequence[str], host: HostGpus | None) -> Ability:
    for name in types:
        capability = host.capabilities.get(name) if host is not None else None
        if capability is None:
            return Ability(None, Problem.TYPE_MISSING, f"its host reports nothing about the vGPU type {name}")
        if not capability.suspendSupported:
            return Ability(False, Problem.NO_SUSPEND, f"its host says suspendSupported: false of the type {name}")
    return POSSIBLE


def _shut_down(vm: Found) -> Ability:
    tools = vm.value(TOOLS, str)
    if tools == "guestToolsRunning":
        return POSSIBLE
    # Tools do not run in a VM that is off or suspended, so nothing is known of those.
    return Ability(None, Problem.TOOLS_MISSING, f"{TOOLS} is {tools or 'not known'}")


def _start(types: Sequence[str], host: HostGpus | None) -> Ability:
    lacking = [name for name in types if host is None or name not in host.types]
    if not lacking:
        return POSSIBLE
    return Ability(None, Problem.TYPE_MISSING, f"its host does not offer {', '.join(lacking)}; another one may")


def _set_type(types: Sequence[str]) -> Ability:
    return POSSIBLE if len(types) == 1 else Ability(False, Problem.NOT_ONE_VGPU, f"the VM has {len(types)} vGPUs")


def _remarks(types: Sequence[str], host: HostGpus | None) -> Iterator[str]:
    for name in dict.fromkeys(types):
        if host is not None and (capability := host.capabilities.get(name)) is not None:
            yield f"migration with {name}: {'yes' if capability.migrateSupported else 'no'}"
            yield f"snapshots with memory with {name}: {'yes' if capability.memorySnapshotSupported else 'no'}"
