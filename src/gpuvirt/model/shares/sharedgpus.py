"""The GPUs of a node in mode `shared`, with the units that pods can get, or why they get none."""

from collections.abc import Mapping

import msgspec

from gpuvirt.facts.ids import PciAddress, ResourceName
from gpuvirt.model.desired.settings import Enforcement, ShareSettings
from gpuvirt.model.reasons import Reason
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.placement import GpuId, Shares

NO_UNITS = Units(0)
UNITS_RESOURCE = ResourceName(ShareSettings().resource)


class SharedGpu(msgspec.Struct, frozen=True):
    """One GPU in mode `shared`."""

    address: PciAddress
    id: GpuId | None = None
    """Its UUID, by which annotations name it; None where the driver does not show it."""
    units: Units | None = None
    """The units that it has, offered or not; None where they are unknown."""
    vgpu_type: str | None = None
    """The vGPU type, if the GPU is a vGPU and the host a VM: `V100-8Q`."""
    minor: int | None = None
    """The number of its device node `/dev/nvidia0`; None where the driver does not show it."""
    withheld: Reason | None = None
    """Why its units are not offered; None if they are."""
    kept: Units = NO_UNITS
    """The units of pods that the API server lacks, or calls ended, while their containers run."""

    @property
    def offered(self) -> Units:
        """The units that pods can get."""
        return self.units if self.withheld is None and self.id is not None and self.units is not None else Units(0)


class SharedGpus(msgspec.Struct, frozen=True):
    """All GPUs of a node in mode `shared`."""

    gpus: tuple[SharedGpu, ...] = ()
    resource: ResourceName = UNITS_RESOURCE
    """The resource that pods request units of."""
    whole: Units = WHOLE
    """The units of a whole card."""
    is_known: bool = False
    """Whether the host was observed, the kubelet's accounts are complete, and what limits shares is known. Otherwise no
    units are offered, and what the node shows stays as it is."""
    recorded: tuple[GpuId, ...] = ()
    """The GPUs that pods of this node have shares of, be they in the host or not; in order."""
    enforcement: Enforcement | None = None
    """The enforcement of the shares of pods that start now; None while it is not known."""
    enforced_by: str = ""
    """The source of `enforcement`: `label gpuvirt.io/shares.enforcement`."""

    @property
    def capacity(self) -> Shares:
        """The units of each GPU that pods can get."""
        return {gpu.id: gpu.offered for gpu in self.gpus if gpu.id is not None and gpu.offered > 0}

    @property
    def schedulable(self) -> Shares:
        """The units of each GPU that pods of the API server have or can get: for the scheduler, which counts those.

        A GPU that gives no units, such as one that has failed, is there with 0, so that the scheduler counts its pods
        on it. Without it, they would count on each other GPU of the node, since they might have any.
        """
        left = {gpu.id: Units(max(gpu.offered - gpu.kept, 0)) for gpu in self.gpus if gpu.id is not None}
        return {**dict.fromkeys(self.recorded, NO_UNITS), **left}

    @property
    def by_address(self) -> Mapping[PciAddress, SharedGpu]:
        """The GPUs by their addresses."""
        return {gpu.address: gpu for gpu in self.gpus}


class NodeVgpuType(msgspec.Struct, frozen=True):
    """The vGPU type of a node that is a VM."""

    label: str | None
    """The value of the node's label, `v100-8q-8GB`; None: the node gets no such label, since its GPUs are whole cards,
    of several types, or not for containers."""
    keys: tuple[str, ...] = ()
    """The keys of the label, by the settings."""
