"""Common parts of the operands on nodes for containers: whether they run, and how they access GPUs.

Contract: NVIDIA's operator, whose images they run. `nvidia.com/gpu.deploy.*` labels select their nodes. They wait for
files in `/run/nvidia/validations`, with containers of gpuvirt's image. They access GPUs by the RuntimeClass that the
container toolkit configures, or by the annotation of its NRI plugin.
"""

from gpuvirt.controller.operands import images
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.operandparts import Operand

RUNTIME_CLASS = "nvidia"


def is_desired(inputs: RenderInputs, operand: Operand, *, default: bool = True) -> bool:
    """Return whether an operand runs; null is its default, and without nodes for containers no operand runs."""
    enabled = default if operand.enabled is None else operand.enabled
    return enabled and not inputs.settings.coexists and inputs.has_container_nodes


def image_of(inputs: RenderInputs, operand: Operand, path: str, variable: str) -> str | SpecFault | None:
    """Return an operand's image, or the fault of its field `path`; None if the operand does not run."""
    return images.image_of(operand, path, inputs.settings.images, variable) if is_desired(inputs, operand) else None


def runtime_class_of(policy: ClusterPolicy) -> str:
    """Return the RuntimeClass of pods that access all GPUs; empty if the NRI plugin injects GPUs."""
    return "" if has_nri(policy) else policy.spec.operator.runtime_class or RUNTIME_CLASS


def has_cdi(policy: ClusterPolicy) -> bool:
    """Return whether container runtimes inject GPUs by CDI."""
    return policy.spec.cdi.enabled is not False


def has_nri(policy: ClusterPolicy) -> bool:
    """Return whether the container toolkit runs its NRI plugin."""
    return has_cdi(policy) and policy.spec.cdi.nri_plugin_enabled is True
