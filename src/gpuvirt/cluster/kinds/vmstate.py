"""What `gpuvirt why vm/NAME` reads of VMs and VMIs: their states, and what they request.

Source: KubeVirt's API `kubevirt.io/v1`.
"""

import msgspec

from gpuvirt.cluster.kinds.core import Condition, Toleration
from gpuvirt.cluster.kinds.kubevirt import Devices
from gpuvirt.cluster.resources import Metadata


class Domain(msgspec.Struct, frozen=True):
    """A guest's hardware."""

    devices: Devices = Devices()


class VmiSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a VMI is to be."""

    domain: Domain = Domain()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()


class VmiStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a VMI is."""

    phase: str = ""
    node_name: str = ""
    conditions: tuple[Condition, ...] = ()


class Vmi(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance."""

    metadata: Metadata
    spec: VmiSpec = VmiSpec()
    status: VmiStatus = VmiStatus()


class Template(msgspec.Struct, frozen=True):
    """What a VM makes VMIs of."""

    spec: VmiSpec = VmiSpec()


class InstancetypeRef(msgspec.Struct, frozen=True):
    """The instance type of a VM."""

    name: str = ""
    kind: str = "VirtualMachineClusterInstancetype"


class VmSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a VM is to be."""

    running: bool | None = None
    run_strategy: str | None = None
    instancetype: InstancetypeRef | None = None
    template: Template = Template()


class VmStatus(msgspec.Struct, frozen=True, rename="camel"):
    """How a VM is."""

    printable_status: str = ""
    conditions: tuple[Condition, ...] = ()


class Vm(msgspec.Struct, frozen=True):
    """A VirtualMachine."""

    metadata: Metadata
    spec: VmSpec = VmSpec()
    status: VmStatus = VmStatus()
