"""NVIDIA's vGPU manager, the host driver for vGPUs, from an image that the admin builds: one DaemonSet for each OS.

Names, mounts and arguments are those with which NVIDIA's operator runs the same image. Four things differ:

- No driver-manager runs before it. The driver-manager unbinds all GPUs from their drivers and unloads the driver
  whenever the pod starts, and does not count a KubeVirt VM as a user of a GPU. To upgrade, an admin deletes the pod on
  a node whose GPUs no VM uses.
- The update strategy is OnDelete, whatever the policy sets for all DaemonSets, for the same reason.
- It stays when the policy is deleted: its pods end the programs that serve running vGPUs when they stop.
- Each operating system has its own DaemonSet, named after it and restricted to its nodes. So a new operating system,
  or the last node of an old one, changes no pods of the others.
"""

import re
from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.podparts import ConfigMapSource, Container, EnvVar, KeyToPath, PodSpec, Volume, VolumeMount
from gpuvirt.cluster.kinds.workloads import DaemonSet, Manifest
from gpuvirt.cluster.labels import OS_LABEL, VGPU_DRIVER, VGPU_DRIVER_LABEL, deploy_label
from gpuvirt.cluster.operator.operands import assembly, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, BOTH, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site

PATH = "$.spec.vgpuManager"
IMAGE_VARIABLE = "VGPU_MANAGER_IMAGE"
SERVICE_ACCOUNT = "nvidia-vgpu-manager"
CONTAINER = "nvidia-vgpu-manager-ctr"
PARAMETERS = "/drivers"
"""The folder in which the image expects files of module parameters; it also contains the driver."""
FIRMWARE = "/sys/module/firmware_class/parameters/path"


def vgpu_manager(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the vGPU manager's DaemonSets, or the fault for which they cannot be deployed."""
    spec = policy.spec
    manager, sandbox = spec.vgpu_manager, spec.sandbox_workloads
    if sandbox.enabled is not True or manager.enabled is not True:
        return
    if spec.driver.use_nvidia_driver_crd is True:
        return
    image = images.image_of(manager, PATH, site.settings.images, IMAGE_VARIABLE)
    if isinstance(image, SpecFault):
        yield image
        return
    if images.is_bare(manager):
        yield SpecFault(f"{PATH}.repository", images.BARE)
        return
    parameters = parameter_files(
        manager.kernel_module_config.name if manager.kernel_module_config else "", f"{PATH}.kernelModuleConfig", site
    )
    if isinstance(parameters, SpecFault):
        yield parameters
        return
    for os_tag in sorted(site.vgpu_os):
        yield _daemon_set(policy, site, os_tag, images.with_os(image, os_tag), parameters)


def named_for(operand: OperandName, os_tag: str) -> str:
    """Return the name of the DaemonSet for an operating system."""
    return f"{operand}-{re.sub('[^a-z0-9.-]', '-', os_tag.lower())}".rstrip(".-")


Parameters = tuple[tuple[Volume, ...], tuple[VolumeMount, ...]]


def parameter_files(config_map: str, path: str, site: Site) -> Parameters | SpecFault:
    """Return a ConfigMap's entries as single files: mounted as a folder they would hide the driver in that folder."""
    if not config_map:
        return (), ()
    entries = site.config_maps.get(config_map)
    if entries is None:
        return SpecFault(
            f"{path}.name",
            f"the ConfigMap {config_map} is not in namespace {site.settings.namespace}; leave the name out, or create"
            f" it: kubectl create configmap {config_map} -n {site.settings.namespace} --from-file=nvidia.conf",
        )
    items = tuple(KeyToPath(key=key, path=key) for key in sorted(entries))
    volume = Volume(name="kernel-module-config", config_map=ConfigMapSource(name=config_map, items=items))
    mounts = (mount(volume.name, f"{PARAMETERS}/{item.path}", read_only=True, part=item.path) for item in items)
    return (volume,), tuple(mounts)


def _daemon_set(policy: ClusterPolicy, site: Site, os_tag: str, image: str, parameters: Parameters) -> DaemonSet:
    manager, paths = policy.spec.vgpu_manager, policy.spec.host_paths
    volumes, mounts = parameters
    container = Container(
        name=CONTAINER,
        image=image,
        image_pull_policy=images.pull_policy(manager.image_pull_policy),
        command=("nvidia-driver",),
        args=manager.args or ("init",),
        env=assembly.environment((EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="void"),), manager.env),
        resources=assembly.resources_of(manager.resources),
        security_context=hostpaths.PRIVILEGED_S0,
        volume_mounts=(*_MOUNTS, *mounts),
    )
    label = VGPU_DRIVER_LABEL if site.settings.coexists else deploy_label(VGPU_DRIVER)
    pod = PodSpec(
        service_account_name=SERVICE_ACCOUNT,
        node_selector={label: "true", OS_LABEL: os_tag},
        host_pid=True,
        host_ipc=True,
        host_network=assembly.on_host_network(manager),
        termination_grace_period_seconds=120,
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, manager),
        containers=(container,),
        volumes=(*_volumes(hostpaths.driver_of(paths)), *volumes),
    )
    draft = assembly.Draft(
        OperandName.VGPU_MANAGER,
        pod,
        name=named_for(OperandName.VGPU_MANAGER, os_tag),
        selected_by={OS_LABEL: os_tag},
        on_delete=True,
        owned=False,
    )
    return assembly.daemon_set(policy, site, draft)


_MOUNTS = (
    mount("run-nvidia", "/run/nvidia", BOTH),
    mount("host-os-release", "/host-etc/os-release", read_only=True),
    mount("dev-vfio", "/dev/vfio"),
    mount("cgroup", "/sys/fs/cgroup"),
    mount("var-log", "/var/log"),
    mount("dev-log", "/dev/log"),
    mount("firmware-search-path", FIRMWARE),
    mount("nv-firmware", "/lib/firmware"),
)


def _volumes(driver: str) -> tuple[Volume, ...]:
    return (
        host("run-nvidia", "/run/nvidia", ANY_FOLDER),
        host("host-os-release", "/etc/os-release"),
        host("dev-vfio", "/dev/vfio", ANY_FOLDER),
        host("cgroup", "/sys/fs/cgroup"),
        host("var-log", "/var/log"),
        host("dev-log", "/dev/log"),
        host("firmware-search-path", FIRMWARE),
        host("nv-firmware", f"{driver}/lib/firmware", ANY_FOLDER),
    )
