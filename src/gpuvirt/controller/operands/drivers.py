"""NVIDIA's drivers, of containers and of vGPUs: one DaemonSet for each operating system, named after it.

So a new operating system, or the last node of an old one, changes no pods of the others. The DaemonSets of the vGPU
manager stay when the policy is deleted: their pods end the programs that serve running vGPUs when they stop.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, hostpaths, images, overlay
from gpuvirt.controller.operands.hostpaths import mount
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.operandparts import ConfigMapName
from gpuvirt.kube.kinds.parts import LocalReference
from gpuvirt.kube.kinds.podparts import ConfigMapSource, EnvFromSource, EnvVar, KeyToPath, Volume, VolumeMount
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest
from gpuvirt.kube.labels import VGPU_DRIVER_LABEL

VGPU_MANAGER = "$.spec.vgpuManager"
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
    image = images.image_of(manager, VGPU_MANAGER, inputs.settings.images, "VGPU_MANAGER_IMAGE")
    if isinstance(image, SpecFault):
        yield image
        return
    if images.is_bare(manager):
        yield SpecFault(f"{VGPU_MANAGER}.repository", images.BARE)
        return
    parameters = parameter_files(manager.kernel_module_config, f"{VGPU_MANAGER}.kernelModuleConfig", inputs)
    if isinstance(parameters, SpecFault):
        yield parameters
        return
    base = bases.with_volumes(overlay.base(policy, inputs, "vgpu-manager"), *parameters)
    if inputs.settings.coexists:
        base = bases.with_pod(base, node_selector={VGPU_DRIVER_LABEL: "true"})
    for os_tag in sorted(inputs.vgpu_os):
        manifest = overlay.configured(overlay.for_os(base, os_tag), inputs, manager, images.with_os(image, os_tag))
        yield assembly.daemon_set(policy, inputs, manifest, owned=False)


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


PATH = "$.spec.driver"


def has_driver(policy: ClusterPolicy, inputs: RenderInputs) -> bool:
    """Return whether gpuvirt deploys the driver's containers."""
    desired = policy.spec.driver
    return overlay.is_desired(inputs, desired) and desired.use_nvidia_driver_crd is not True


def driver(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the driver's DaemonSets, or the faults for which they cannot be deployed."""
    desired = policy.spec.driver
    if not has_driver(policy, inputs):
        return
    image = images.image_of(desired, PATH, inputs.settings.images, "DRIVER_IMAGE")
    manager = images.image_of(desired.manager, f"{PATH}.manager", inputs.settings.images, "DRIVER_MANAGER_IMAGE")
    parameters = parameter_files(desired.kernel_module_config, f"{PATH}.kernelModuleConfig", inputs)
    yield from (fault for fault in (image, manager, parameters) if isinstance(fault, SpecFault))
    if isinstance(image, str) and isinstance(manager, str) and not isinstance(parameters, SpecFault):
        base = bases.with_volumes(_base(policy, inputs, manager), *parameters)
        for os_tag in sorted(inputs.container_os):
            manifest = overlay.configured(overlay.for_os(base, os_tag), inputs, desired, images.with_os(image, os_tag))
            secrets = assembly.secrets(inputs.settings.pull_secrets, desired, desired.manager)
            manifest = bases.with_pod(manifest, image_pull_secrets=secrets)
            yield assembly.daemon_set(policy, inputs, manifest)


def _base(policy: ClusterPolicy, inputs: RenderInputs, manager: str) -> DaemonSet:
    """Return the manifest with the fields that only the driver and its driver-manager have; `manager` is an image."""
    desired, manifest = policy.spec.driver, overlay.base(policy, inputs, "driver")
    unused, uninstall = bases.pod_of(manifest).init_containers
    if desired.kernel_module_type:
        manifest = bases.with_env(manifest, (EnvVar(name="KERNEL_MODULE_TYPE", value=desired.kernel_module_type),))
    if desired.secret_env:
        secret = EnvFromSource(secret_ref=LocalReference(name=desired.secret_env))
        manifest = bases.with_main(manifest, env_from=(secret,))
    if (probe := bases.main_of(manifest).startup_probe) is not None:
        manifest = bases.with_main(manifest, startup_probe=assembly.probe(probe, desired.startup_probe))
    kubelet = f"/host{hostpaths.kubelet_of(policy.spec.host_paths)}"
    unused = replace(unused, env=overlay.with_values(unused.env, {"GPUVIRT_KUBELET_DIR": kubelet}))
    uninstall = replace(
        uninstall,
        image=manager,
        image_pull_policy=images.pull_policy(desired.manager.image_pull_policy),
        env=assembly.environment(uninstall.env, desired.manager.env),
    )
    return bases.with_pod(manifest, init_containers=(unused, uninstall))
