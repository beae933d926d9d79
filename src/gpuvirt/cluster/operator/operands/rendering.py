"""All operands of a policy, rendered."""

from collections.abc import Callable, Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.operands.agent import agent
from gpuvirt.cluster.operator.operands.dcgm import dcgm, dcgm_exporter
from gpuvirt.cluster.operator.operands.deviceplugin import device_plugin, gfd
from gpuvirt.cluster.operator.operands.driver import driver
from gpuvirt.cluster.operator.operands.site import Fault, OperandName, Rendered, Site
from gpuvirt.cluster.operator.operands.toolkit import runtime_classes, toolkit
from gpuvirt.cluster.operator.operands.validator import validator
from gpuvirt.cluster.operator.operands.vgpumanager import vgpu_manager

Render = Callable[[ClusterPolicy, Site], Iterator[Manifest | SpecFault]]

OPERANDS: tuple[tuple[OperandName, Render], ...] = (
    (OperandName.VGPU_MANAGER, vgpu_manager),
    (OperandName.AGENT, agent),
    (OperandName.RUNTIME_CLASSES, runtime_classes),
    (OperandName.DRIVER, driver),
    (OperandName.TOOLKIT, toolkit),
    (OperandName.VALIDATOR, validator),
    (OperandName.DEVICE_PLUGIN, device_plugin),
    (OperandName.DCGM, dcgm),
    (OperandName.DCGM_EXPORTER, dcgm_exporter),
    (OperandName.GFD, gfd),
)


def render(policy: ClusterPolicy, site: Site) -> Rendered:
    """Return all objects that there are to be, in the order in which they need each other, and what is in the way."""
    manifests, faults = list[Manifest](), list[Fault]()
    for operand, rendered in OPERANDS:
        for one in rendered(policy, site):
            if isinstance(one, SpecFault):
                faults.append(Fault(operand, one))
            else:
                manifests.append(one)
    return Rendered(tuple(manifests), tuple(faults))


def config_maps_of(policy: ClusterPolicy) -> frozenset[str]:
    """Return the ConfigMaps whose entries must be known before the policy can be rendered (`Site.config_maps`)."""
    spec = policy.spec
    named = (spec.vgpu_manager.kernel_module_config, spec.driver.kernel_module_config)
    return frozenset(one.name for one in named if one is not None and one.name)
