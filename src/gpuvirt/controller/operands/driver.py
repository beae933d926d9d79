"""NVIDIA's driver on nodes for containers (manifests/driver.yaml): one DaemonSet for each operating system."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, containernodes, hostpaths, images, overlay
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.vgpumanager import parameter_files
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.manifests import LocalReference
from gpuvirt.kube.kinds.podparts import EnvFromSource, EnvVar
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest

PATH = "$.spec.driver"
IMAGE_VARIABLE, MANAGER_VARIABLE = "DRIVER_IMAGE", "DRIVER_MANAGER_IMAGE"


def has_driver(policy: ClusterPolicy, inputs: RenderInputs) -> bool:
    """Return whether gpuvirt deploys the driver's containers."""
    desired = policy.spec.driver
    return containernodes.is_desired(inputs, desired) and desired.use_nvidia_driver_crd is not True


def driver(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the driver's DaemonSets, or the faults for which they cannot be deployed."""
    desired = policy.spec.driver
    if not has_driver(policy, inputs):
        return
    image = images.image_of(desired, PATH, inputs.settings.images, IMAGE_VARIABLE)
    manager = images.image_of(desired.manager, f"{PATH}.manager", inputs.settings.images, MANAGER_VARIABLE)
    parameters = parameter_files(desired.kernel_module_config, f"{PATH}.kernelModuleConfig", inputs)
    yield from (fault for fault in (image, manager, parameters) if isinstance(fault, SpecFault))
    if isinstance(image, str) and isinstance(manager, str) and not isinstance(parameters, SpecFault):
        base = bases.with_volumes(_base(policy, inputs, manager), *parameters)
        for os_tag in sorted(inputs.container_os):
            found = overlay.configured(overlay.for_os(base, os_tag), inputs, desired, images.with_os(image, os_tag))
            secrets = assembly.secrets(inputs.settings.pull_secrets, desired, desired.manager)
            found = bases.with_pod(found, image_pull_secrets=secrets)
            yield assembly.daemon_set(policy, inputs, found)


def _base(policy: ClusterPolicy, inputs: RenderInputs, manager: str) -> DaemonSet:
    """Return the manifest with the fields that only the driver and its driver-manager have; `manager` is an image."""
    desired, found = policy.spec.driver, overlay.base(policy, inputs, "driver")
    unused, uninstall = bases.pod_of(found).init_containers
    if desired.kernel_module_type:
        found = bases.with_env(found, (EnvVar(name="KERNEL_MODULE_TYPE", value=desired.kernel_module_type),))
    if desired.secret_env:
        secret = EnvFromSource(secret_ref=LocalReference(name=desired.secret_env))
        found = bases.with_main(found, env_from=(secret,))
    if (probe := bases.main_of(found).startup_probe) is not None:
        found = bases.with_main(found, startup_probe=assembly.probe(probe, desired.startup_probe))
    kubelet = f"/host{hostpaths.kubelet_of(policy.spec.host_paths)}"
    unused = replace(unused, env=overlay.with_values(unused.env, {"GPUVIRT_KUBELET_DIR": kubelet}))
    uninstall = replace(
        uninstall,
        image=manager,
        image_pull_policy=images.pull_policy(desired.manager.image_pull_policy),
        env=assembly.environment(uninstall.env, desired.manager.env),
    )
    return bases.with_pod(found, init_containers=(unused, uninstall))
