"""NVIDIA's container toolkit, which configures a node's container runtime, and the RuntimeClasses that pods name.

The toolkit finds the runtime's files by environment variables. The policy sets them to paths on the host; the operand
mounts these paths, and sets the variables to the paths in the container.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.podparts import Container, EnvVar, PodSpec, Volume, VolumeMount
from gpuvirt.cluster.kinds.workloads import Manifest, RuntimeClass
from gpuvirt.cluster.operator.operands import assembly, containernodes, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, INTO, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site
from gpuvirt.cluster.operator.operands.validator import validation

PATH = "$.spec.toolkit"
IMAGE_VARIABLE = "CONTAINER_TOOLKIT_IMAGE"
SERVICE_ACCOUNT = "nvidia-container-toolkit"
CONTAINER = "nvidia-container-toolkit-ctr"
INSTALL_DIR = "/usr/local/nvidia"
# Some versions of containerd end a container that restarts containerd within its first seconds.
START = f"{containernodes.EXPORT_DRIVER_PATHS}; sleep 5; exec nvidia-toolkit"


@dataclass(frozen=True, slots=True)
class RuntimeFile:
    """A file of a container runtime: its variables and its paths."""

    variable: str
    """The variable by which the policy may set the path on the host."""
    default_path: str
    """The path on the host without this variable."""
    mount_path: str
    """Where the container mounts the file's folder."""
    container_variables: tuple[str, ...]
    """The container's variables for the path in the container."""
    host_variable: str = ""
    """The container's variable for the path on the host; empty without one."""


SOCKET = RuntimeFile(
    "CONTAINERD_SOCKET",
    "/run/containerd/containerd.sock",
    "/runtime/sock-dir",
    ("RUNTIME_SOCKET", "CONTAINERD_SOCKET"),
)
RUNTIMES: dict[str, tuple[RuntimeFile, ...]] = {
    "containerd": (
        RuntimeFile(
            "CONTAINERD_CONFIG",
            "/etc/containerd/config.toml",
            "/runtime/config-dir",
            ("RUNTIME_CONFIG", "CONTAINERD_CONFIG"),
        ),
        RuntimeFile(
            "RUNTIME_DROP_IN_CONFIG",
            "/etc/containerd/conf.d/99-nvidia.toml",
            "/runtime/config-dir.d",
            ("RUNTIME_DROP_IN_CONFIG",),
            "RUNTIME_DROP_IN_CONFIG_HOST_PATH",
        ),
        SOCKET,
    ),
    "crio": (
        RuntimeFile("CRIO_CONFIG", "/etc/crio/config.toml", "/runtime/config-dir", ("RUNTIME_CONFIG", "CRIO_CONFIG")),
        RuntimeFile(
            "RUNTIME_DROP_IN_CONFIG",
            "/etc/crio/crio.conf.d/99-nvidia.conf",
            "/runtime/config-dir.d",
            ("RUNTIME_DROP_IN_CONFIG",),
            "RUNTIME_DROP_IN_CONFIG_HOST_PATH",
        ),
    ),
}
CONFIG_SOURCE = "RUNTIME_CONFIG_SOURCE"
NRI_SOCKET = RuntimeFile("NRI_SOCKET", "/var/run/nri/nri.sock", "/runtime/nri-sock-dir", ("NRI_SOCKET",))


def runtime_classes(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the RuntimeClasses; none if the NRI plugin injects GPUs."""
    main = containernodes.runtime_class_of(policy)
    if site.settings.coexists or not site.has_container_nodes or not main:
        return
    more = (f"{containernodes.RUNTIME_CLASS}-cdi", f"{containernodes.RUNTIME_CLASS}-legacy")
    for name in (main, *(more if containernodes.has_cdi(policy) else ())):
        about = assembly.metadata(policy, site, OperandName.RUNTIME_CLASSES, name, clusterwide=True)
        yield RuntimeClass(api_version=workloads.NODE, metadata=about, handler=name)


def toolkit(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the toolkit's DaemonSet, or the fault for which it cannot be deployed."""
    desired = policy.spec.toolkit
    image = containernodes.image_of(site, desired, PATH, IMAGE_VARIABLE)
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    runtime_files = RUNTIMES.get(site.runtime)
    if runtime_files is None:
        yield SpecFault(
            f"{PATH}.enabled",
            f"nodes run the container runtime {site.runtime}, but gpuvirt configures only {' and '.join(RUNTIMES)}:"
            " install the container toolkit on the hosts, and set enabled to false",
        )
        return
    if containernodes.has_nri(policy):
        runtime_files = (*runtime_files, NRI_SOCKET)
    pod = PodSpec(
        service_account_name=SERVICE_ACCOUNT,
        node_selector=containernodes.selector("container-toolkit"),
        host_pid=True,
        host_network=assembly.on_host_network(desired),
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, desired),
        init_containers=(validation(policy, site, "driver"),),
        containers=(_container(policy, site, image, runtime_files),),
        volumes=(*_volumes(policy), *_folders(policy, runtime_files)),
    )
    yield assembly.daemon_set(policy, site, assembly.Draft(OperandName.TOOLKIT, pod))


def install_dir_of(policy: ClusterPolicy) -> str:
    """Return the folder of the host into which the toolkit is installed."""
    return policy.spec.toolkit.install_dir or INSTALL_DIR


def _container(policy: ClusterPolicy, site: Site, image: str, runtime_files: tuple[RuntimeFile, ...]) -> Container:
    desired, install_dir = policy.spec.toolkit, install_dir_of(policy)
    environment = assembly.environment(_variables(policy, site, install_dir), desired.env)
    variables = {variable.name: variable for variable in environment}
    for file in runtime_files:
        path = _host_path(policy, file)
        for name in file.container_variables:
            variables[name] = EnvVar(name=name, value=f"{file.mount_path}/{path.name}")
        if file.host_variable:
            variables[file.host_variable] = EnvVar(name=file.host_variable, value=str(path))
    if (sources := variables.get(CONFIG_SOURCE)) is not None:
        variables[CONFIG_SOURCE] = EnvVar(name=CONFIG_SOURCE, value=_sources(sources.value or ""))
    return Container(
        name=CONTAINER,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        command=("/bin/sh", "-c"),
        args=(START,),
        env=tuple(variables.values()),
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED_S0,
        volume_mounts=(
            mount("toolkit-root", "/run/nvidia/toolkit"),
            mount("run-nvidia-validations", hostpaths.VALIDATIONS),
            mount("toolkit-install-dir", install_dir),
            mount("driver-install-dir", "/driver-root", INTO),
            mount("host-root", "/host", INTO, read_only=True),
            mount("cdi-root", "/var/run/cdi"),
            *(VolumeMount(name=_volume_name(file), mount_path=file.mount_path) for file in runtime_files),
        ),
    )


def _sources(text: str) -> str:
    """Return the sources of the runtime's settings (`command,file=/a.toml`) with the files' paths in the container."""
    parts = (source.partition("=") for source in text.split(","))
    return ",".join(
        f"file=/host/{path.lstrip('/')}" if kind == "file" and path else f"{kind}{sign}{path}"
        for kind, sign, path in parts
    )


def _variables(policy: ClusterPolicy, site: Site, install_dir: str) -> Iterator[EnvVar]:
    yield containernodes.NO_GPUS
    yield EnvVar(name="TOOLKIT_PID_FILE", value="/run/nvidia/toolkit/toolkit.pid")
    yield EnvVar(name="RUNTIME", value=site.runtime)
    yield EnvVar(name="ROOT", value=install_dir)
    if site.runtime == "containerd":
        runtime_class = policy.spec.operator.runtime_class or containernodes.RUNTIME_CLASS
        yield EnvVar(name="CONTAINERD_RUNTIME_CLASS", value=runtime_class)
    else:
        yield EnvVar(name="CRIO_CONFIG_MODE", value="config")
    if containernodes.has_cdi(policy):
        yield EnvVar(name="CDI_ENABLED", value="true")
        yield EnvVar(name="NVIDIA_RUNTIME_SET_AS_DEFAULT", value="false")
        yield EnvVar(name="NVIDIA_CONTAINER_RUNTIME_MODE", value="cdi")
        yield EnvVar(name="NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND", value="management.nvidia.com/gpu")
    if containernodes.has_nri(policy):
        yield EnvVar(name="ENABLE_NRI_PLUGIN", value="true")
        yield hostpaths.field_of("NRI_NAMESPACE", "metadata.namespace")


def _host_path(policy: ClusterPolicy, found: RuntimeFile) -> PurePosixPath:
    """Return the path on the host of a file of the container runtime."""
    desired = {variable.name: variable.value for variable in policy.spec.toolkit.env if variable.value}
    return PurePosixPath(desired.get(found.variable, found.default_path))


def _volume_name(found: RuntimeFile) -> str:
    return found.mount_path.rpartition("/")[2].replace(".", "-")


def _folders(policy: ClusterPolicy, runtime_files: tuple[RuntimeFile, ...]) -> Iterator[Volume]:
    for file in runtime_files:
        is_socket = file in {SOCKET, NRI_SOCKET}
        yield host(_volume_name(file), str(_host_path(policy, file).parent), "" if is_socket else ANY_FOLDER)


def _volumes(policy: ClusterPolicy) -> tuple[Volume, ...]:
    paths = policy.spec.host_paths
    return (
        host("toolkit-root", "/run/nvidia/toolkit", ANY_FOLDER),
        host("run-nvidia-validations", hostpaths.VALIDATIONS, ANY_FOLDER),
        host("toolkit-install-dir", install_dir_of(policy)),
        host("driver-install-dir", hostpaths.driver_of(paths), ANY_FOLDER),
        host("host-root", hostpaths.root_of(paths)),
        host("cdi-root", "/var/run/cdi", ANY_FOLDER),
        host("host-dev-char", "/dev/char"),
    )
