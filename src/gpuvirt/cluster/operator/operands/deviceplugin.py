"""NVIDIA's device plugin, which offers GPUs to containers, and GPU feature discovery, which labels their nodes."""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.podparts import Container, EnvVar
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.operands import assembly, containernodes, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, INTO, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site
from gpuvirt.cluster.operator.operands.toolkit import install_dir_of

PLUGIN, GFD = "nvidia-device-plugin", "gpu-feature-discovery"
PLUGIN_ACCOUNT, GFD_ACCOUNT = "nvidia-device-plugin", "nvidia-gpu-feature-discovery"
"""The service accounts: `containernodes.pod` names them after the components."""
FEATURES = "/etc/kubernetes/node-feature-discovery/features.d"


def device_plugin(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the device plugin's DaemonSet, or the fault for which it cannot be deployed."""
    desired, kubelet = policy.spec.device_plugin, hostpaths.kubelet_of(policy.spec.host_paths)
    image = containernodes.image_of(site, desired, "$.spec.devicePlugin", "DEVICE_PLUGIN_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    volumes = (
        host("device-plugin", f"{kubelet}/device-plugins"),
        host("run-nvidia-validations", hostpaths.VALIDATIONS, ANY_FOLDER),
        host("driver-install-dir", hostpaths.driver_of(policy.spec.host_paths), ANY_FOLDER),
        host("host-root", hostpaths.root_of(policy.spec.host_paths)),
        host("cdi-root", "/var/run/cdi", ANY_FOLDER),
    )
    pod = containernodes.pod(policy, site, desired, "device-plugin", _plugin(policy, image), volumes)
    draft = assembly.Draft(OperandName.DEVICE_PLUGIN, pod, annotations=containernodes.sees_gpus(policy, PLUGIN))
    yield assembly.daemon_set(policy, site, draft)


def _plugin(policy: ClusterPolicy, image: str) -> Container:
    desired = policy.spec.device_plugin
    return Container(
        name=PLUGIN,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        command=("/bin/sh", "-c", f'{containernodes.EXPORT_DRIVER_PATHS}; exec nvidia-device-plugin "$@"', PLUGIN),
        args=desired.args,
        env=assembly.environment(_plugin_variables(policy), desired.env),
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED,
        volume_mounts=(
            # The plugin expects this path, whatever the path on the host.
            mount("device-plugin", "/var/lib/kubelet/device-plugins"),
            mount("run-nvidia-validations", hostpaths.VALIDATIONS),
            mount("driver-install-dir", "/driver-root", INTO),
            mount("host-root", "/host", INTO, read_only=True),
            mount("cdi-root", "/var/run/cdi"),
        ),
    )


def _plugin_variables(policy: ClusterPolicy) -> Iterator[EnvVar]:
    yield EnvVar(name="PASS_DEVICE_SPECS", value="true")
    yield EnvVar(name="FAIL_ON_INIT_ERROR", value="true")
    yield EnvVar(name="DEVICE_ID_STRATEGY", value="uuid")
    yield EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="all")
    yield EnvVar(name="NVIDIA_DRIVER_CAPABILITIES", value="all")
    yield from mig_variables(policy)
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


def gfd(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet of GPU feature discovery, or the fault for which it cannot be deployed."""
    desired = policy.spec.gfd
    image = containernodes.image_of(site, desired, "$.spec.gfd", "GFD_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    volumes = (
        host("run-nvidia-validations", hostpaths.VALIDATIONS, ANY_FOLDER),
        host("output-dir", FEATURES, ANY_FOLDER),
        host("host-sys", "/sys"),
    )
    pod = containernodes.pod(policy, site, desired, GFD, _gfd(policy, image), volumes)
    draft = assembly.Draft(OperandName.GFD, pod, annotations=containernodes.sees_gpus(policy, GFD))
    yield assembly.daemon_set(policy, site, draft)


def _gfd(policy: ClusterPolicy, image: str) -> Container:
    desired = policy.spec.gfd
    own = (
        EnvVar(name="GFD_SLEEP_INTERVAL", value="60s"),
        EnvVar(name="GFD_FAIL_ON_INIT_ERROR", value="true"),
        EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="all"),
        hostpaths.field_of("NAMESPACE", "metadata.namespace"),
        hostpaths.NODE_NAME,
        *mig_variables(policy),
    )
    return Container(
        name=GFD,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        command=(GFD,),
        args=desired.args,
        env=assembly.environment(own, desired.env),
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED,
        volume_mounts=(mount("output-dir", FEATURES), mount("host-sys", "/sys", read_only=True)),
    )
