"""NVIDIA's operands on nodes for containers beside the driver: toolkit, validator, device plugin, DCGM, GFD.

The validator runs gpuvirt's image, the others NVIDIA's.

The toolkit finds the runtime's files by environment variables. The policy sets them to paths on the host; the operand
mounts these paths, and sets the variables to the paths in the container.
"""

from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

import msgspec
from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, hostpaths, overlay
from gpuvirt.controller.operands.drivers import has_driver
from gpuvirt.controller.operands.hostpaths import ANY_FOLDER, host
from gpuvirt.controller.operands.inputs import OperandName, RenderInputs
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.podparts import ConfigMapSource, EnvVar, Volume, VolumeMount
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest, RuntimeClass

PATH = "$.spec.toolkit"
INSTALLED = "toolkit-install-dir"
"""The volume of that folder, which has the same path in the container."""


class RuntimeFile(msgspec.Struct, frozen=True):
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


def runtime_classes(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the RuntimeClasses; none if the NRI plugin injects GPUs."""
    main = overlay.runtime_class_of(policy)
    if inputs.settings.coexists or not inputs.has_container_nodes or not main:
        return
    more = (f"{overlay.RUNTIME_CLASS}-cdi", f"{overlay.RUNTIME_CLASS}-legacy")
    for name in (main, *(more if overlay.has_cdi(policy) else ())):
        about = assembly.metadata(policy, inputs, OperandName.RUNTIME_CLASSES, name, clusterwide=True)
        yield RuntimeClass(api_version=workloads.NODE, metadata=about, handler=name)


def toolkit(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the toolkit's DaemonSet, or the fault for which it cannot be deployed."""
    desired = policy.spec.toolkit
    image = yield from overlay.image_of(inputs, desired, PATH, "CONTAINER_TOOLKIT_IMAGE")
    if image is None:
        return
    runtime_files = RUNTIMES.get(inputs.runtime)
    if runtime_files is None:
        yield SpecFault(
            f"{PATH}.enabled",
            f"nodes run the container runtime {inputs.runtime}, but gpuvirt configures only {' and '.join(RUNTIMES)}:"
            " install the container toolkit on the hosts, and set enabled to false",
        )
        return
    if overlay.has_nri(policy):
        runtime_files = (*runtime_files, NRI_SOCKET)
    manifest = _installing(validating(overlay.base(policy, inputs, "toolkit"), policy, inputs), policy)
    env = overlay.with_values(
        bases.main_of(manifest).env, {"RUNTIME": inputs.runtime, "ROOT": hostpaths.toolkit_of(policy)}
    )
    manifest = bases.with_main(manifest, env=(*env, *_variables(policy, inputs)))
    manifest = overlay.configured(manifest, inputs, replace(desired, args=()), image)
    env = _of_the_container(bases.main_of(manifest).env, policy, runtime_files)
    mounts = (VolumeMount(name=_volume_name(file), mount_path=file.mount_path) for file in runtime_files)
    manifest = bases.with_volumes(bases.with_main(manifest, env=env), _folders(policy, runtime_files), mounts)
    yield assembly.daemon_set(policy, inputs, manifest)


def _installing(manifest: DaemonSet, policy: ClusterPolicy) -> DaemonSet:
    """Return the manifest with the folder into which the toolkit is installed."""
    folder = hostpaths.toolkit_of(policy)
    volumes, mounts = bases.pod_of(manifest).volumes, bases.main_of(manifest).volume_mounts
    placed = (replace(mount, mount_path=folder) if mount.name == INSTALLED else mount for mount in mounts)
    chosen = (hostpaths.host(INSTALLED, folder) if volume.name == INSTALLED else volume for volume in volumes)
    return bases.with_pod(bases.with_main(manifest, volume_mounts=tuple(placed)), volumes=tuple(chosen))


def _of_the_container(
    env: Iterable[EnvVar], policy: ClusterPolicy, runtime_files: Iterable[RuntimeFile]
) -> tuple[EnvVar, ...]:
    """Return the container's variables with the paths in the container, where the policy has those on the host."""
    variables = {variable.name: variable for variable in env}
    for file in runtime_files:
        path = _host_path(policy, file)
        for name in file.container_variables:
            variables[name] = EnvVar(name=name, value=f"{file.mount_path}/{path.name}")
        if file.host_variable:
            variables[file.host_variable] = EnvVar(name=file.host_variable, value=str(path))
    if (sources := variables.get(CONFIG_SOURCE)) is not None:
        variables[CONFIG_SOURCE] = EnvVar(name=CONFIG_SOURCE, value=_sources(sources.value or ""))
    return tuple(variables.values())


def _sources(text: str) -> str:
    """Return the sources of the runtime's settings (`command,file=/a.toml`) with the files' paths in the container."""
    parts = (source.partition("=") for source in text.split(","))
    return ",".join(
        f"file=/host/{path.lstrip('/')}" if kind == "file" and path else f"{kind}{sign}{path}"
        for kind, sign, path in parts
    )


def _variables(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[EnvVar]:
    if inputs.runtime == "containerd":
        runtime_class = policy.spec.operator.runtime_class or overlay.RUNTIME_CLASS
        yield EnvVar(name="CONTAINERD_RUNTIME_CLASS", value=runtime_class)
    else:
        yield EnvVar(name="CRIO_CONFIG_MODE", value="config")
    if overlay.has_cdi(policy):
        yield EnvVar(name="CDI_ENABLED", value="true")
        yield EnvVar(name="NVIDIA_RUNTIME_SET_AS_DEFAULT", value="false")
        yield EnvVar(name="NVIDIA_CONTAINER_RUNTIME_MODE", value="cdi")
        yield EnvVar(name="NVIDIA_CONTAINER_RUNTIME_MODES_CDI_DEFAULT_KIND", value="management.nvidia.com/gpu")
    if overlay.has_nri(policy):
        yield EnvVar(name="ENABLE_NRI_PLUGIN", value="true")
        yield hostpaths.field_of("NRI_NAMESPACE", "metadata.namespace")


def _host_path(policy: ClusterPolicy, file: RuntimeFile) -> PurePosixPath:
    """Return the path on the host of a file of the container runtime."""
    desired = {variable.name: variable.value for variable in policy.spec.toolkit.env if variable.value}
    return PurePosixPath(desired.get(file.variable, file.default_path))


def _volume_name(file: RuntimeFile) -> str:
    return file.mount_path.rpartition("/")[2].replace(".", "-")


def _folders(policy: ClusterPolicy, runtime_files: tuple[RuntimeFile, ...]) -> Iterator[Volume]:
    for file in runtime_files:
        is_socket = file in {SOCKET, NRI_SOCKET}
        yield host(_volume_name(file), str(_host_path(policy, file).parent), "" if is_socket else ANY_FOLDER)


def validator(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the validator's DaemonSet."""
    desired = policy.spec.validator
    if not overlay.is_desired(inputs, desired):
        return
    manifest = validating(overlay.base(policy, inputs, "validator"), policy, inputs)
    # Arguments and variables are those of the checks, and the last container has none.
    manifest = overlay.configured(manifest, inputs, replace(desired, args=(), env=()))
    yield assembly.daemon_set(policy, inputs, manifest)


def validating(manifest: DaemonSet, policy: ClusterPolicy, inputs: RenderInputs) -> DaemonSet:
    """Return a manifest whose init containers, which are all checks of the validator, have the policy's settings."""
    desired = policy.spec.validator
    of_checks = {
        "driver-validation": desired.driver.env,
        "toolkit-validation": desired.toolkit.env,
        "plugin-validation": desired.plugin.env,
    }
    values = {"GPUVIRT_DRIVER_DIR": hostpaths.driver_of(policy.spec.host_paths)}
    if not has_driver(policy, inputs):
        values["GPUVIRT_DRIVER_STARTED"] = ""
    checks = (
        replace(
            check,
            env=assembly.environment(overlay.with_values(check.env, values), (*desired.env, *of_checks[check.name])),
            resources=assembly.resources_of(desired.resources, check.resources),
        )
        for check in bases.pod_of(manifest).init_containers
    )
    return bases.with_pod(manifest, init_containers=tuple(checks))


OWN_COUNTERS = "dcgm-metrics.csv"
"""The key of the ConfigMap that lists the exported metrics."""
REMOTE = "DCGM_REMOTE_HOSTENGINE_INFO"


def dcgm(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield DCGM's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm
    image = yield from overlay.image_of(inputs, desired, "$.spec.dcgm", "DCGM_IMAGE")
    if image is None:
        return
    manifest = overlay.configured(overlay.base(policy, inputs, "dcgm"), inputs, desired, image)
    yield assembly.daemon_set(policy, inputs, manifest)
    yield assembly.service(policy, inputs, bases.service("dcgm-service"))


def dcgm_exporter(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the exporter's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm_exporter
    image = yield from overlay.image_of(inputs, desired, "$.spec.dcgmExporter", "DCGM_EXPORTER_IMAGE")
    if image is None:
        return
    manifest = _with_counters(overlay.base(policy, inputs, "dcgm-exporter"), policy)
    if not overlay.is_desired(inputs, policy.spec.dcgm):
        own = (variable for variable in bases.main_of(manifest).env if variable.name != REMOTE)
        manifest = bases.with_main(manifest, env=tuple(own))
    manifest = bases.with_pod(overlay.configured(manifest, inputs, desired, image), host_pid=desired.host_pid is True)
    about = manifest.spec.template.metadata
    manifest = bases.with_metadata(
        manifest,
        labels={**assembly.unreserved(desired.pod_labels), **about.labels},
        annotations={**about.annotations, **desired.pod_annotations},
    )
    yield assembly.daemon_set(policy, inputs, manifest)
    service = bases.service("dcgm-exporter-service")
    if (chosen := desired.service) is not None:
        traffic = chosen.internal_traffic_policy
        service = replace(service, spec=replace(service.spec, type=chosen.type, internal_traffic_policy=traffic))
    yield assembly.service(policy, inputs, service)


def _with_counters(manifest: DaemonSet, policy: ClusterPolicy) -> DaemonSet:
    """Return the exporter's manifest with the ConfigMap that lists the exported metrics."""
    config = policy.spec.dcgm_exporter.config
    if config is None or not config.name:
        return manifest
    path = f"/etc/dcgm-exporter/{OWN_COUNTERS}"
    volume = Volume(name="metrics-config", config_map=ConfigMapSource(name=config.name))
    place = hostpaths.mount(volume.name, path, OWN_COUNTERS)
    env = overlay.with_values(bases.main_of(manifest).env, {"DCGM_EXPORTER_COLLECTORS": path})
    return bases.with_main(bases.with_volumes(manifest, (volume,), (place,)), env=env)


def device_plugin(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the device plugin's DaemonSet, or the fault for which it cannot be deployed."""
    desired = policy.spec.device_plugin
    image = yield from overlay.image_of(inputs, desired, "$.spec.devicePlugin", "DEVICE_PLUGIN_IMAGE")
    if image is None:
        return
    manifest = overlay.base(policy, inputs, "device-plugin")
    manifest = bases.with_env(manifest, (*mig_variables(policy), *_cdi_variables(policy)))
    yield assembly.daemon_set(policy, inputs, overlay.configured(manifest, inputs, desired, image))


def _cdi_variables(policy: ClusterPolicy) -> Iterator[EnvVar]:
    if not overlay.has_cdi(policy):
        yield EnvVar(name="DEVICE_LIST_STRATEGY", value="envvar")
        return
    yield EnvVar(name="CDI_ENABLED", value="true")
    yield EnvVar(name="DEVICE_LIST_STRATEGY", value="cdi-annotations,cdi-cri")
    yield EnvVar(name="CDI_ANNOTATION_PREFIX", value="cdi.k8s.io/")
    if policy.spec.toolkit.enabled is not False:
        yield EnvVar(name="NVIDIA_CDI_HOOK_PATH", value=f"{hostpaths.toolkit_of(policy)}/toolkit/nvidia-cdi-hook")


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
    image = yield from overlay.image_of(inputs, desired, "$.spec.gfd", "GFD_IMAGE")
    if image is None:
        return
    manifest = bases.with_env(overlay.base(policy, inputs, "gpu-feature-discovery"), mig_variables(policy))
    yield assembly.daemon_set(policy, inputs, overlay.configured(manifest, inputs, desired, image))
