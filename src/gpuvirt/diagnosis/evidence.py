"""The input of all checks: the host, its inventory, the agent's NodeView, the kubelet, KubeVirt's configuration."""

import re
from collections.abc import Iterable, Iterator

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import PciFunction
from gpuvirt.facts.platform import FunctionSetup
from gpuvirt.facts.setup import KubeletFacts, Setup
from gpuvirt.model.allocation.podallocations import PodAllocations
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode
from gpuvirt.model.desired.settings import Settings, VfioNodes
from gpuvirt.model.inventory.inventory import Gpu, Inventory
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.model.offers.view import GpuView, NodeView

IOMMUFD_RESOURCE = "devices.kubevirt.io/iommufd"
"""The resource that each virt-launcher pod requests with KubeVirt's gate IOMMUFD."""
IOMMUFD_KERNEL = (6, 2)
"""The first kernel with `/dev/iommu`; distributions may add it to older ones."""

_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})")


class ClusterNode(msgspec.Struct, frozen=True):
    """A node on which KubeVirt runs VMs."""

    name: str
    kernel: str
    """`5.15.0-91-generic`; empty if the node does not report it."""
    iommufd: bool | None = None
    """Whether the node offers IOMMUFD_RESOURCE, which it does with `/dev/iommu`; None while the gate IOMMUFD is off."""


def without_iommufd(nodes: Iterable[ClusterNode]) -> tuple[ClusterNode, ...]:
    """Return the nodes that KubeVirt has found to lack `/dev/iommu`."""
    return tuple(node for node in nodes if node.iommufd is False)


def probably_without_iommufd(nodes: Iterable[ClusterNode]) -> tuple[ClusterNode, ...]:
    """Return the nodes that lack `/dev/iommu`, or whose kernel is too old to have it."""
    return tuple(node for node in nodes if node.iommufd is False or (node.iommufd is None and _is_old(node.kernel)))


def _is_old(kernel: str) -> bool:
    return kernel_series(kernel, IOMMUFD_KERNEL) < IOMMUFD_KERNEL


def kernel_series(release: str, default: tuple[int, int]) -> tuple[int, int]:
    """Return the series of a kernel, (6, 8) for `6.8.0-31-generic`; `default` where the text has none."""
    match = _RELEASE.match(release)
    return default if match is None else (int(match[1]), int(match[2]))


class Evidence(msgspec.Struct, frozen=True):
    """The input of all checks."""

    setup: Setup
    inventory: Inventory
    view: NodeView
    """The view that `gpuvirt devices` prints."""
    settings: Settings
    kubelet: KubeletFacts
    allocations: PodAllocations = PodAllocations()
    """The allocations by the kubelet, of any device plugin, on a host without an agent, whose view has them."""
    agent_has_run: bool = False
    """Whether an agent has offered devices on the host, now or before."""
    kubevirts: tuple[KubeVirt, ...] | None = None
    """None without `--kubevirt` and without access to the API server."""
    cluster_nodes: tuple[ClusterNode, ...] | None = None
    """None without access to the nodes of the API server."""

    @property
    def node(self) -> str:
        """The name of the host's node, for commands; NODE where no agent knows it."""
        agent = self.view.agent
        return agent.node if agent is not None and agent.node is not None else "NODE"

    def desired_of(self, gpu: GpuView) -> str:
        """Return the desired mode of a GPU: the agent's, and without one that of the settings."""
        return gpu.desired or self.settings.own_modes.of(gpu.address)

    def creatable_on_demand(self, gpu: GpuView) -> frozenset[str]:
        """Return the types of which a GPU in mode on-demand can carry another vGPU now; none in another mode."""
        if gpu.planning is None or self.desired_of(gpu) != DesiredMode.ON_DEMAND:
            return frozenset()
        return frozenset(vgpu_type for vgpu_type, number in gpu.planning.types.items() if number)

    @property
    def serves_containers_only(self) -> bool:
        """Whether all GPUs are for containers, by their desired modes; without the agent by the settings."""
        modes = set(map(self.desired_of, self.view.gpus))
        return bool(modes) and modes <= set(FOR_CONTAINERS)

    @property
    def shares_gpus(self) -> bool:
        """Whether a GPU is in mode `shared`, by its desired mode; without the agent by the settings."""
        return any(self.desired_of(gpu) == DesiredMode.SHARED for gpu in self.view.gpus)

    @property
    def vfio_nodes(self) -> VfioNodes:
        """The device nodes that containers get: by the running agent, else by the settings."""
        agent = self.view.agent
        return agent.vfio_nodes if agent is not None else self.settings.vfio_nodes

    @property
    def on_vfio(self) -> tuple[Gpu, ...]:
        """The GPUs that are bound to a VFIO driver."""
        return tuple(gpu for gpu in self.inventory.gpus.values() if gpu.function.on_vfio)

    def gpu_setups(self) -> Iterator[tuple[Gpu, FunctionSetup]]:
        """Yield the GPUs with the attributes that only `gpuvirt doctor` reads."""
        for address, gpu in self.inventory.gpus.items():
            if (setup := self.setup.functions.get(address)) is not None:
                yield gpu, setup

    def function(self, address: PciAddress) -> PciFunction | None:
        """Return the function at an address."""
        return self.inventory.facts.functions.get(address)
