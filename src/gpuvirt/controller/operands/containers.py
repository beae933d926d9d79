"""NVIDIA's operands on nodes for containers beside driver and toolkit: validator, device plugin, DCGM, GFD.

The validator runs gpuvirt's image, the others NVIDIA's.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, hostpaths, overlay
from gpuvirt.controller.operands.drivers import has_driver
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.podparts import ConfigMapSource, EnvVar, Volume
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest


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
