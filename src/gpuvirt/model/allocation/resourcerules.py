"""The resources of other device plugins: the vendor of their GPUs, whether they are no GPUs, and what their ids are."""

import re

import msgspec

from gpuvirt.facts.ids import DeviceId, ResourceName
from gpuvirt.facts.pci import AMD, INTEL, NVIDIA
from gpuvirt.model.allocation.pluginanswers import PluginAnswer

_VENDORS_OF_DOMAINS = (
    (NVIDIA, re.compile(r"(?:gpu\.)?nvidia\.com")),
    (AMD, re.compile(r"(?:gpu\.)?amd\.com")),
    (INTEL, re.compile(r"gpu\.intel\.com")),
)
"""Domains of resources, and names of DRA drivers, under which only devices of this vendor are offered as GPUs."""

_KUBEVIRTS = "devices.kubevirt.io"

WITHOUT_GPUS = (
    _KUBEVIRTS,
    "*.network.kubevirt.io",
    "rdma",
    "mellanox.com",
    "openshift.io",
    "sgx.intel.com",
    "qat.intel.com",
    "dsa.intel.com",
    "iaa.intel.com",
    "dlb.intel.com",
    "fpga.intel.com",
    "compute-domain.nvidia.com",
    "github.com/fuse",
)
"""Domains, and one resource, of device plugins and DRA drivers that give no GPUs: KVM and networks of KubeVirt, RDMA,
network functions, accelerators of Intel that are no GPUs, memory channels between NVIDIA's nodes, FUSE."""


class ResourceRules(msgspec.Struct, frozen=True):
    """Properties of resources that the ids and answers of their plugins do not show."""

    ours: frozenset[ResourceName] = frozenset()
    """The resources that gpuvirt has ever offered on the node."""
    without_gpus: tuple[str, ...] = ()
    """Resources that are no GPUs besides `WITHOUT_GPUS`, by the settings."""

    def is_without_gpus(self, resource: ResourceName) -> bool:
        """Return whether a resource is known to be no GPU."""
        return any(_matches(pattern, resource) for pattern in (*WITHOUT_GPUS, *self.without_gpus))

    def is_group_number(self, resource: ResourceName, device: DeviceId, answer: PluginAnswer | None) -> bool:
        """Return whether a device id is the number of an IOMMU group, as in KubeVirt's own device plugin.

        Plugins of other devices count theirs: RDMA's shared plugin from 0. So digits are a group only as an id of
        gpuvirt's resources, which KubeVirt's plugin may offer too, of KubeVirt's, or of a GPU vendor's domain where
        the plugin's answer names no device nodes. Nodes in an answer show the group themselves.
        """
        if not is_number(device):
            return False
        if resource in self.ours or _matches(_KUBEVIRTS, resource):
            return True
        return vendor_of_domain(resource) is not None and (answer is None or not answer.nodes)


def is_number(device: DeviceId) -> bool:
    """Return whether a device id is a number."""
    return device.isascii() and device.isdigit()


def vendor_of_domain(resource: ResourceName) -> int | None:
    """Return the vendor whose GPUs are offered under the domain of a resource, None for another domain."""
    domain = resource.partition("/")[0]
    return next((vendor for vendor, pattern in _VENDORS_OF_DOMAINS if pattern.fullmatch(domain)), None)


def _matches(pattern: str, resource: ResourceName) -> bool:
    """Return whether a resource has a name or a domain; `*.example.com` stands for all domains below."""
    domain = resource.partition("/")[0]
    if pattern.startswith("*."):
        return domain.endswith(pattern[1:])
    return pattern in {resource, domain}
