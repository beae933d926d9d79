"""NVIDIA's device plugin, which offers GPUs to containers, and GPU feature discovery, which labels their nodes."""

from collections.abc import Iterator

from gpuvirt.controller.operands import assembly, bases, containernodes, overlay
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.toolkit import install_dir_of
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.podparts import EnvVar
from gpuvirt.kube.kinds.workloads import Manifest


def device_plugin(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the device plugin's DaemonSet, or the fault for which it cannot be deployed."""
    desired = policy.spec.device_plugin
    image = containernodes.image_of(inputs, desired, "$.spec.devicePlugin", "DEVICE_PLUGIN_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    found = overlay.base(policy, inputs, "device-plugin")
    found = bases.with_env(found, (*mig_variables(policy), *_cdi_variables(policy)))
    yield assembly.daemon_set(policy, inputs, overlay.configured(found, inputs, desired, image))


def _cdi_variables(policy: ClusterPolicy) -> Iterator[EnvVar]:
    if not containernodes.has_cdi(policy):
        yield EnvVar(name="DEVICE_LIST_STRATEGY", value="envvar")
        return
    yield EnvVar(name="CDI_ENABLED", value="true")
    yield EnvVar(name="DEVICE_LIST_STRATEGY", value="cdi-annotations,cdi-cri")
    yield EnvVar(name="CDI_ANNOTATION_PREFIX", value="cdi.k8s.io/")
    if policy.spec.toolkit.enabled is not False:
        yield EnvVar(name="NVIDIA_CDI_HOOK_PATH", value=f"{install_dir_of(policy)}/toolkit/nvidia-cdi-hook")


def mig_variables(policy: ClusterPolicy) -> Iterator[EnvVar]:
    """Yield the variables for how MIG devices are offered."""
    strategy = policy.spec.mig.strategy
    if strategy is not None:
        yield EnvVar(name="MIG_STRATEGY", value=strategy.value)
    if strategy is None or strategy.value != "none":
        yield EnvVar(name="NVIDIA_MIG_MONITOR_DEVICES", value="all")


def gfd(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet of GPU feature discovery, or the fault for which it cannot be deployed."""
    desired = policy.spec.gfd
    image = containernodes.image_of(inputs, desired, "$.spec.gfd", "GFD_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    found = bases.with_env(overlay.base(policy, inputs, "gpu-feature-discovery"), mig_variables(policy))
    yield assembly.daemon_set(policy, inputs, overlay.configured(found, inputs, desired, image))
