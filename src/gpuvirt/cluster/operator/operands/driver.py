"""NVIDIA's driver on nodes for containers: one DaemonSet for each operating system.

NVIDIA's driver-manager runs before the driver, as an init container. It removes the pods that use the old driver, and
also unbinds every GPU of the node from VFIO drivers. So an affinity keeps these pods off nodes with an agent, whatever
their other labels. And the first init container waits until no VM can be using a GPU, since VMs may also use GPUs of a
node that never had an agent.
"""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.manifests import LocalReference
from gpuvirt.cluster.kinds.podparts import (
    Affinity,
    Container,
    EnvFromSource,
    EnvVar,
    Exec,
    Lifecycle,
    LifecycleHandler,
    NodeAffinity,
    NodeSelector,
    PodSpec,
    ProbeSpec,
    Requirement,
    SelectorTerm,
    Volume,
)
from gpuvirt.cluster.kinds.workloads import DaemonSet, Manifest
from gpuvirt.cluster.labels import NODE_LABEL, OS_LABEL
from gpuvirt.cluster.operator.operands import assembly, containernodes, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, BOTH, FOLDER, INTO, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site
from gpuvirt.cluster.operator.operands.vgpumanager import FIRMWARE, Parameters, named_for, parameter_files

PATH = "$.spec.driver"
IMAGE_VARIABLE, MANAGER_VARIABLE = "DRIVER_IMAGE", "DRIVER_MANAGER_IMAGE"
SERVICE_ACCOUNT = "nvidia-driver"
CONTAINER = "nvidia-driver-ctr"
STARTED = f"{hostpaths.VALIDATIONS}/.driver-ctr-ready"
"""The file by which the driver's container reports to the validators that it has started."""
MEMORY_ONLINE = "/sys/devices/system/memory/auto_online_blocks"
PROBE = ProbeSpec(
    exec=Exec(
        command=(
            "sh",
            "-c",
            f"test -f /sys/module/nvidia/refcnt && nvidia-smi && mkdir -p {hostpaths.VALIDATIONS} && touch {STARTED}",
        )
    ),
    initial_delay_seconds=60,
    timeout_seconds=60,
    period_seconds=10,
    failure_threshold=120,
)
WITHOUT_AGENT = Affinity(
    node_affinity=NodeAffinity(
        required=NodeSelector(
            node_selector_terms=(
                SelectorTerm(match_expressions=(Requirement(key=NODE_LABEL, operator="NotIn", values=("true",)),)),
            )
        )
    )
)


def has_driver(policy: ClusterPolicy, site: Site) -> bool:
    """Return whether gpuvirt deploys the driver's containers."""
    desired = policy.spec.driver
    return containernodes.is_desired(site, desired) and desired.use_nvidia_driver_crd is not True


def driver(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the driver's DaemonSets, or the faults for which they cannot be deployed."""
    desired = policy.spec.driver
    if not has_driver(policy, site):
        return
    image = images.image_of(desired, PATH, site.settings.images, IMAGE_VARIABLE)
    manager = images.image_of(desired.manager, f"{PATH}.manager", site.settings.images, MANAGER_VARIABLE)
    config = desired.kernel_module_config
    parameters = parameter_files(config.name if config else "", f"{PATH}.kernelModuleConfig", site)
    yield from (fault for fault in (image, manager, parameters) if isinstance(fault, SpecFault))
    if isinstance(image, str) and isinstance(manager, str) and not isinstance(parameters, SpecFault):
        for os_tag in sorted(site.container_os):
            yield _daemon_set(policy, site, os_tag, (images.with_os(image, os_tag), manager), parameters)


def _daemon_set(
    policy: ClusterPolicy, site: Site, os_tag: str, chosen: tuple[str, str], parameters: Parameters
) -> DaemonSet:
    desired, (image, manager) = policy.spec.driver, chosen
    pod = PodSpec(
        service_account_name=SERVICE_ACCOUNT,
        node_selector={**containernodes.selector("driver"), OS_LABEL: os_tag},
        affinity=WITHOUT_AGENT,
        host_pid=True,
        host_network=assembly.on_host_network(desired),
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, desired, desired.manager),
        init_containers=(_await_unused(policy, site), _manager(policy, manager)),
        containers=(_driver(policy, image, parameters),),
        volumes=(*_volumes(policy), *parameters[0]),
    )
    draft = assembly.Draft(
        OperandName.DRIVER,
        pod,
        name=named_for(OperandName.DRIVER, os_tag),
        selected_by={OS_LABEL: os_tag},
        labels={"app.kubernetes.io/component": "nvidia-driver"},
        on_delete=True,
    )
    return assembly.daemon_set(policy, site, draft)


def _await_unused(policy: ClusterPolicy, site: Site) -> Container:
    """Return the container that waits until no VM can be using a GPU: driver-manager unbinds even GPUs in use."""
    return Container(
        name="gpus-unused-validation",
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("validate", "unused", "--wait"),
        env=(
            containernodes.NO_GPUS,
            EnvVar(name="GPUVIRT_HOST_ROOT", value="/host"),
            EnvVar(name="GPUVIRT_KUBELET_DIR", value=f"/host{hostpaths.kubelet_of(policy.spec.host_paths)}"),
        ),
        security_context=hostpaths.PRIVILEGED,
        volume_mounts=(mount("host-root", "/host", INTO, read_only=True),),
    )


def _manager(policy: ClusterPolicy, image: str) -> Container:
    desired = policy.spec.driver.manager
    own = (
        hostpaths.NODE_NAME,
        containernodes.NO_GPUS,
        EnvVar(name="ENABLE_GPU_POD_EVICTION", value="true"),
        EnvVar(name="ENABLE_AUTO_DRAIN", value="false"),
        hostpaths.field_of("OPERATOR_NAMESPACE", "metadata.namespace"),
    )
    return Container(
        name="k8s-driver-manager",
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        command=("driver-manager",),
        args=("uninstall_driver",),
        env=assembly.environment(own, desired.env),
        security_context=hostpaths.PRIVILEGED,
        volume_mounts=(
            mount("run-nvidia", "/run/nvidia", BOTH),
            mount("host-root", "/host", INTO, read_only=True),
            mount("host-sys", "/sys"),
        ),
    )


def _driver(policy: ClusterPolicy, image: str, parameters: Parameters) -> Container:
    desired = policy.spec.driver
    own = [hostpaths.NODE_NAME, hostpaths.field_of("NODE_IP", "status.hostIP"), containernodes.NO_GPUS]
    if desired.kernel_module_type:
        own.append(EnvVar(name="KERNEL_MODULE_TYPE", value=desired.kernel_module_type))
    secret = (EnvFromSource(secret_ref=LocalReference(name=desired.secret_env)),) if desired.secret_env else ()
    return Container(
        name=CONTAINER,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        command=("nvidia-driver",),
        args=desired.args or ("init",),
        env=assembly.environment(own, desired.env),
        env_from=secret,
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED_S0,
        startup_probe=assembly.probe(PROBE, desired.startup_probe),
        lifecycle=Lifecycle(pre_stop=LifecycleHandler(exec=Exec(command=("/bin/sh", "-c", f"rm -f {STARTED}")))),
        volume_mounts=(*_MOUNTS, *parameters[1]),
    )


_MOUNTS = (
    mount("run-nvidia", "/run/nvidia", BOTH),
    mount("run-nvidia-fabricmanager", "/run/nvidia-fabricmanager"),
    mount("run-nvidia-topologyd", "/run/nvidia-topologyd"),
    mount("var-log", "/var/log"),
    mount("dev-log", "/dev/log"),
    mount("host-os-release", "/host-etc/os-release", read_only=True),
    mount("sysfs-memory-online", MEMORY_ONLINE),
    mount("firmware-search-path", FIRMWARE),
    mount("nv-firmware", "/lib/firmware"),
)


def _volumes(policy: ClusterPolicy) -> tuple[Volume, ...]:
    paths = policy.spec.host_paths
    return (
        host("run-nvidia", "/run/nvidia", ANY_FOLDER),
        host("run-nvidia-fabricmanager", "/run/nvidia-fabricmanager", ANY_FOLDER),
        host("run-nvidia-topologyd", "/run/nvidia-topologyd", ANY_FOLDER),
        host("var-log", "/var/log"),
        host("dev-log", "/dev/log"),
        host("host-os-release", "/etc/os-release"),
        host("sysfs-memory-online", MEMORY_ONLINE),
        host("firmware-search-path", FIRMWARE),
        host("nv-firmware", f"{hostpaths.driver_of(paths)}/lib/firmware", ANY_FOLDER),
        host("host-root", hostpaths.root_of(paths)),
        host("host-sys", "/sys", FOLDER),
    )
