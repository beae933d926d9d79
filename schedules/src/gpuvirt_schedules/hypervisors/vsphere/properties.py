"""Properties of a vCenter's objects, read by paths."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
from pyVmomi import vim, vmodl

from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import Problem
from gpuvirt_schedules.hypervisors.vsphere.faults import problem_of

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
            yield FoundObject(entry.obj, values, tuple(f"{path} ({_name(fault)})" for path, fault in faults))
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


def _name(fault: object) -> str:
    return type(fault).__name__.rpartition(".")[2]


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
