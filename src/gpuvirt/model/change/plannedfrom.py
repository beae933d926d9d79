"""The states of a node's GPUs as plans of vGPUs see them, and which of them are those of the last plans."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.change.smimemory import SmiMemory
from gpuvirt.model.change.vgpus.gpustate import (
    NAMESPACE,
    GpuState,
    Holding,
    gpu_state_of,
    has_live,
    holdings_by_function,
    holdings_on,
    with_report,
)
from gpuvirt.model.desired.configchoice import ConfigGpu
from gpuvirt.model.inventory.inventory import Inventory


@dataclass(frozen=True, slots=True)
class PlannedFrom:
    """What the plans of a node have followed from, and the states of its GPUs, for the next plans."""

    inventory: Inventory
    smi: SmiMemory
    holdings: Mapping[PciAddress, tuple[Holding, ...]]
    found: Mapping[PciAddress, GpuState | None]
    """The states without nvidia-smi's reports."""
    states: Mapping[PciAddress, GpuState | None]
    again: frozenset[PciAddress] = frozenset()
    """The GPUs whose states, with nvidia-smi's reports, are those of the plans before."""
    config_gpus: list[ConfigGpu] = field(default_factory=list)
    """The GPUs that the vGPU config has chosen from; none without a config."""

    def state_again(self, inventory: Inventory, gpu: PciAddress, holdings: tuple[Holding, ...]) -> GpuState | None:
        """Return the last state of a GPU if the same follows again, else None."""
        last, host, users = self.found.get(gpu), inventory.gpus[gpu].vgpu_host, inventory.facts.users
        if last is None or host is None or host.framework is Framework.SRIOV_VF:  # whose users depend on its VFs
            return None
        before = self.inventory.gpus[gpu]
        is_same = before.function is inventory.gpus[gpu].function and before.vgpu_host is host
        is_same = is_same and (self.inventory is inventory or users is self.inventory.facts.users)
        if not is_same or self.holdings.get(gpu, ()) != holdings:
            return None
        if self.inventory is not inventory and not has_live(last, inventory, host):
            return None
        return last

    def is_again(self, inventory: Inventory, gpu: PciAddress, found: GpuState | None, smi: SmiMemory) -> bool:
        """Return whether the state of a GPU, with nvidia-smi's report, is that of the last plan."""
        is_same = found is not None and found is self.found.get(gpu)
        is_same = is_same and inventory.facts.functions[gpu] is self.inventory.facts.functions[gpu]
        return is_same and smi.reports.get(gpu) is self.smi.reports.get(gpu)


def states_of(
    inventory: Inventory,
    gpus: Iterable[PciAddress],
    allocated: Iterable[Holding],
    smi: SmiMemory,
    last: PlannedFrom | None,
) -> PlannedFrom:
    """Return the states of GPUs with what they follow from; `allocated` has all allocated vGPUs of the node."""
    functions, by_function = inventory.facts.functions, holdings_by_function(allocated)
    holdings = {gpu: holdings_on(functions[gpu], by_function) for gpu in gpus}
    found: dict[PciAddress, GpuState | None] = {}
    states: dict[PciAddress, GpuState | None] = {}
    unchanged: list[PciAddress] = []
    for gpu, of_gpu in holdings.items():
        again = last.state_again(inventory, gpu, of_gpu) if last is not None else None
        found[gpu] = again if again is not None else gpu_state_of(inventory, gpu, of_gpu, NAMESPACE)
        if last is not None and last.is_again(inventory, gpu, found[gpu], smi):
            states[gpu] = last.states[gpu]
            unchanged.append(gpu)
        else:
            states[gpu] = _with_report(functions[gpu], found[gpu], smi)
    return PlannedFrom(inventory, smi, holdings, found, states, frozenset(unchanged))


def _with_report(function: PciFunction, gpu_state: GpuState | None, smi: SmiMemory) -> GpuState | None:
    observed = smi.reports.get(function.address)
    return gpu_state if gpu_state is None or observed is None else with_report(gpu_state, function, observed[1])
