"""Renders all operands of a policy."""

from collections.abc import Callable, Iterator

from gpuvirt.controller.operands.agent import agent, labeller, mps_daemon
from gpuvirt.controller.operands.containers import (
    dcgm,
    dcgm_exporter,
    device_plugin,
    gfd,
    runtime_classes,
    toolkit,
    validator,
)
from gpuvirt.controller.operands.drivers import driver, vgpu_manager
from gpuvirt.controller.operands.inputs import Fault, OperandName, Rendered, RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.workloads import Manifest

Render = Callable[[ClusterPolicy, RenderInputs], Iterator[Manifest | SpecFault]]

OPERANDS: tuple[tuple[OperandName, Render], ...] = (
    (OperandName.VGPU_MANAGER, vgpu_manager),
    (OperandName.AGENT, agent),
    (OperandName.MPS, mps_daemon),
    (OperandName.LABELLER, labeller),
    (OperandName.RUNTIME_CLASSES, runtime_classes),
    (OperandName.DRIVER, driver),
    (OperandName.TOOLKIT, toolkit),
    (OperandName.VALIDATOR, validator),
    (OperandName.DEVICE_PLUGIN, device_plugin),
    (OperandName.DCGM, dcgm),
    (OperandName.DCGM_EXPORTER, dcgm_exporter),
    (OperandName.GFD, gfd),
)


def render(policy: ClusterPolicy, inputs: RenderInputs) -> Rendered:
    """Return all objects to apply, in the order of their dependencies, and the faults."""
    manifests, faults = list[Manifest](), list[Fault]()
    for operand, rendered in OPERANDS:
        for item in rendered(policy, inputs):
            if isinstance(item, SpecFault):
                faults.append(Fault(operand, item))
            else:
                manifests.append(item)
    return Rendered(tuple(manifests), tuple(faults))


def config_maps_of(policy: ClusterPolicy) -> frozenset[str]:
    """Return the ConfigMaps whose keys rendering needs (`RenderInputs.config_maps`)."""
    spec = policy.spec
    configs = (spec.vgpu_manager.kernel_module_config, spec.driver.kernel_module_config)
    return frozenset(config.name for config in configs if config is not None and config.name)
