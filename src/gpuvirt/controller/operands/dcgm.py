"""NVIDIA's DCGM, which monitors GPUs, and its metrics exporter, on nodes for containers (manifests/dcgm*.yaml)."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.controller.operands import assembly, bases, containernodes, hostpaths, overlay
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.kube.kinds.podparts import ConfigMapSource, Volume
from gpuvirt.kube.kinds.workloads import DaemonSet, Manifest

OWN_COUNTERS = "dcgm-metrics.csv"
"""The key of the ConfigMap that lists the exported metrics."""
REMOTE = "DCGM_REMOTE_HOSTENGINE_INFO"


def dcgm(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield DCGM's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm
    image = containernodes.image_of(inputs, desired, "$.spec.dcgm", "DCGM_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    found = overlay.configured(overlay.base(policy, inputs, "dcgm"), inputs, desired, image)
    yield assembly.daemon_set(policy, inputs, found)
    yield assembly.service(policy, inputs, bases.service("dcgm-service"))


def dcgm_exporter(policy: ClusterPolicy, inputs: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the exporter's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm_exporter
    image = containernodes.image_of(inputs, desired, "$.spec.dcgmExporter", "DCGM_EXPORTER_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    found = _with_counters(overlay.base(policy, inputs, "dcgm-exporter"), policy)
    if not containernodes.is_desired(inputs, policy.spec.dcgm):
        own = (variable for variable in bases.main_of(found).env if variable.name != REMOTE)
        found = bases.with_main(found, env=tuple(own))
    found = bases.with_pod(overlay.configured(found, inputs, desired, image), host_pid=desired.host_pid is True)
    about = found.spec.template.metadata
    found = bases.with_metadata(
        found,
        labels={**assembly.unreserved(desired.pod_labels), **about.labels},
        annotations={**about.annotations, **desired.pod_annotations},
    )
    yield assembly.daemon_set(policy, inputs, found)
    service = bases.service("dcgm-exporter-service")
    if (chosen := desired.service) is not None:
        traffic = chosen.internal_traffic_policy
        service = replace(service, spec=replace(service.spec, type=chosen.type, internal_traffic_policy=traffic))
    yield assembly.service(policy, inputs, service)


def _with_counters(found: DaemonSet, policy: ClusterPolicy) -> DaemonSet:
    """Return the exporter's manifest with the ConfigMap that lists the exported metrics."""
    config = policy.spec.dcgm_exporter.config
    if config is None or not config.name:
        return found
    path = f"/etc/dcgm-exporter/{OWN_COUNTERS}"
    volume = Volume(name="metrics-config", config_map=ConfigMapSource(name=config.name))
    place = hostpaths.mount(volume.name, path, OWN_COUNTERS)
    env = overlay.with_values(bases.main_of(found).env, {"DCGM_EXPORTER_COLLECTORS": path})
    return bases.with_main(bases.with_volumes(found, (volume,), (place,)), env=env)
