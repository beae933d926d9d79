"""NVIDIA's vGPU manager (manifests/vgpu-manager.yaml): one DaemonSet for each operating system, named after it.

So a new operating system, or the last node of an old one, changes no pods of the others. The DaemonSets stay when the
policy is deleted: their pods end the programs that serve running vGPUs when they stop.
"""

from collections.abc import Iterator

from gpuvirt.controller.operands import assembly, bases, images, overlay
from gpuvirt.controller.operands.hostpaths import mount
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.operandparts import ConfigMapName
from gpuvirt.kube.kinds.podparts import ConfigMapSource, KeyToPath, Volume, VolumeMount
from gpuvirt.kube.kinds.workloads import Manifest
from gpuvirt.kube.labels import VGPU_DRIVER_LABEL

PATH = "$.spec.vgpuManager"
IMAGE_VARIABLE = "VGPU_MANAGER_IMAGE"
PARAMETERS = "/drivers"
"""The folder in which the image expects files of module parameters; it also contains the driver."""


def vgpu_manager(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the vGPU manager's DaemonSets, or the fault for which they cannot be deployed."""
    spec = policy.spec
    manager, sandbox = spec.vgpu_manager, spec.sandbox_workloads
    if sandbox.enabled is not True or manager.enabled is not True:
        return
    if spec.driver.use_nvidia_driver_crd is True:
        return
    image = images.image_of(manager, PATH, inputs.settings.images, IMAGE_VARIABLE)
    if isinstance(image, SpecFault):
        yield image
        return
    if images.is_bare(manager):
        yield SpecFault(f"{PATH}.repository", images.BARE)
        return
    parameters = parameter_files(manager.kernel_module_config, f"{PATH}.kernelModuleConfig", inputs)
    if isinstance(parameters, SpecFault):
        yield parameters
        return
    base = bases.with_volumes(overlay.base(policy, inputs, "vgpu-manager"), *parameters)
    if inputs.settings.coexists:
        base = bases.with_pod(base, node_selector={VGPU_DRIVER_LABEL: "true"})
    for os_tag in sorted(inputs.vgpu_os):
        found = overlay.configured(overlay.for_os(base, os_tag), inputs, manager, images.with_os(image, os_tag))
        yield assembly.daemon_set(policy, inputs, found, owned=False)


Parameters = tuple[tuple[Volume, ...], tuple[VolumeMount, ...]]


def parameter_files(config: ConfigMapName | None, path: str, inputs: RenderInputs) -> Parameters | SpecFault:
    """Return a ConfigMap's entries as single files: mounted as a folder they would hide the driver in that folder."""
    if config is None or not config.name:
        return (), ()
    entries = inputs.config_maps.get(config.name)
    if entries is None:
        return SpecFault(
            f"{path}.name",
            f"the ConfigMap {config.name} is not in namespace {inputs.settings.namespace}; leave the name out, or"
            f" create it: kubectl create configmap {config.name} -n {inputs.settings.namespace}"
            " --from-file=nvidia.conf",
        )
    items = tuple(KeyToPath(key=key, path=key) for key in sorted(entries))
    volume = Volume(name="kernel-module-config", config_map=ConfigMapSource(name=config.name, items=items))
    mounts = (mount(volume.name, f"{PARAMETERS}/{item.path}", item.path) for item in items)
    return (volume,), tuple(mounts)
