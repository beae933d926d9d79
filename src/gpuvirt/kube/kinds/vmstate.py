"""VMs and VMIs as `gpuvirt why vm/NAME` reads them: their states and device requests.

Source: KubeVirt's API `kubevirt.io/v1`.
"""

import msgspec

from gpuvirt.kube.kinds.core import Condition, Toleration
from gpuvirt.kube.kinds.kubevirt import Domain
from gpuvirt.kube.resources import Metadata


class VmiSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The desired state of a VMI."""

    domain: Domain = Domain()
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()


class VmiStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The observed state of a VMI."""

    phase: str = ""
    node_name: str = ""
    conditions: tuple[Condition, ...] = ()


class Vmi(msgspec.Struct, frozen=True):
    """A VirtualMachineInstance."""

    metadata: Metadata
    spec: VmiSpec = VmiSpec()
    status: VmiStatus = VmiStatus()


class Template(msgspec.Struct, frozen=True):
    """The template for the VMIs of a VM."""

    spec: VmiSpec = VmiSpec()


class InstancetypeRef(msgspec.Struct, frozen=True):
    """A reference to the instance type of a VM."""

    name: str = ""
    kind: str = "VirtualMachineClusterInstancetype"


class VmSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The desired state of a VM."""

    running: bool | None = None
    run_strategy: str | None = None
    instancetype: InstancetypeRef | None = None
    template: Template = Template()


class VmStatus(msgspec.Struct, frozen=True, rename="camel"):
    """The observed state of a VM."""

    printable_status: str = ""
    conditions: tuple[Condition, ...] = ()


class Vm(msgspec.Struct, frozen=True):
    """A VirtualMachine."""

    metadata: Metadata
    spec: VmSpec = VmSpec()
    status: VmStatus = VmStatus()
