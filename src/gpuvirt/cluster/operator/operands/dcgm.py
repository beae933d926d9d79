"""NVIDIA's DCGM, which monitors GPUs, and its metrics exporter, on nodes for containers."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.podparts import (
    Container,
    ContainerPort,
    EnvVar,
    HttpGet,
    ProbeSpec,
    TcpSocket,
    Volume,
    VolumeMount,
)
from gpuvirt.cluster.kinds.workloads import Manifest, Service, ServicePort, ServiceSpec
from gpuvirt.cluster.operator.operands import assembly, containernodes, hostpaths, images
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site

ENGINE_PORT, METRICS_PORT = 5555, 9400
ENGINE, EXPORTER = "nvidia-dcgm-ctr", "nvidia-dcgm-exporter"
COUNTERS = "/etc/dcgm-exporter/dcp-metrics-included.csv"
OWN_COUNTERS = "dcgm-metrics.csv"
"""The key of the ConfigMap that lists the exported metrics."""
ALL_VISIBLE = EnvVar(name="NVIDIA_VISIBLE_DEVICES", value="all")
VALIDATIONS = host("run-nvidia-validations", hostpaths.VALIDATIONS, ANY_FOLDER)


def dcgm(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield DCGM's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm
    image = containernodes.image_of(site, desired, "$.spec.dcgm", "DCGM_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    probe = ProbeSpec(tcp_socket=TcpSocket(port=ENGINE_PORT), initial_delay_seconds=15)
    container = Container(
        name=ENGINE,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        args=desired.args,
        env=assembly.environment((ALL_VISIBLE,), desired.env),
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED,
        ports=(ContainerPort(name="dcgm", container_port=ENGINE_PORT),),
        liveness_probe=probe,
        readiness_probe=probe,
    )
    pod = containernodes.pod(policy, site, desired, "dcgm", container, (VALIDATIONS,))
    draft = assembly.Draft(OperandName.DCGM, pod, annotations=containernodes.sees_gpus(policy, ENGINE))
    yield assembly.daemon_set(policy, site, draft)
    # Each exporter connects to the DCGM of its own node.
    spec = ServiceSpec(
        selector={"app": OperandName.DCGM.value},
        ports=(ServicePort(name="dcgm", port=ENGINE_PORT),),
        internal_traffic_policy="Local",
    )
    about = assembly.metadata(policy, site, OperandName.DCGM, OperandName.DCGM.value)
    yield Service(api_version=workloads.CORE, metadata=about, spec=spec)


def dcgm_exporter(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the exporter's DaemonSet and Service, or the fault for which they cannot be deployed."""
    desired = policy.spec.dcgm_exporter
    image = containernodes.image_of(site, desired, "$.spec.dcgmExporter", "DCGM_EXPORTER_IMAGE")
    if isinstance(image, SpecFault):
        yield image
    if not isinstance(image, str):
        return
    volumes, mounts = _counters(policy)
    pod_resources = f"{hostpaths.kubelet_of(policy.spec.host_paths)}/pod-resources"
    volumes = (VALIDATIONS, host("pod-gpu-resources", pod_resources), *volumes)
    pod = containernodes.pod(policy, site, desired, "dcgm-exporter", _exporter(policy, site, image, mounts), volumes)
    draft = assembly.Draft(
        OperandName.DCGM_EXPORTER,
        replace(pod, host_pid=desired.host_pid is True),
        labels=assembly.unreserved(desired.pod_labels),
        annotations={**containernodes.sees_gpus(policy, EXPORTER), **desired.pod_annotations},
    )
    yield assembly.daemon_set(policy, site, draft)
    yield _service(policy, site)


def _exporter(policy: ClusterPolicy, site: Site, image: str, mounts: tuple[VolumeMount, ...]) -> Container:
    desired = policy.spec.dcgm_exporter
    own = [
        EnvVar(name="DCGM_EXPORTER_LISTEN", value=f":{METRICS_PORT}"),
        EnvVar(name="DCGM_EXPORTER_KUBERNETES", value="true"),
        EnvVar(name="DCGM_EXPORTER_COLLECTORS", value=mounts[0].mount_path if mounts else COUNTERS),
        ALL_VISIBLE,
        hostpaths.NODE_NAME,
    ]
    if containernodes.is_desired(site, policy.spec.dcgm):
        own.append(EnvVar(name="DCGM_REMOTE_HOSTENGINE_INFO", value=f"{OperandName.DCGM}:{ENGINE_PORT}"))
    page = HttpGet(path="/health", port=METRICS_PORT)
    return Container(
        name=EXPORTER,
        image=image,
        image_pull_policy=images.pull_policy(desired.image_pull_policy),
        args=desired.args,
        env=assembly.environment(own, desired.env),
        resources=assembly.resources_of(desired.resources),
        security_context=hostpaths.PRIVILEGED,
        ports=(ContainerPort(name="metrics", container_port=METRICS_PORT),),
        liveness_probe=ProbeSpec(http_get=page, initial_delay_seconds=45, period_seconds=5),
        readiness_probe=ProbeSpec(http_get=page, initial_delay_seconds=45),
        # The exporter expects this path, whatever the path on the host.
        volume_mounts=(mount("pod-gpu-resources", "/var/lib/kubelet/pod-resources", read_only=True), *mounts),
    )


def _counters(policy: ClusterPolicy) -> tuple[tuple[Volume, ...], tuple[VolumeMount, ...]]:
    """Return the volume and the mount of the ConfigMap that lists the exported metrics."""
    config = policy.spec.dcgm_exporter.config
    if config is None or not config.name:
        return (), ()
    volume = hostpaths.files("metrics-config", config.name)
    return (volume,), (mount(volume.name, f"/etc/dcgm-exporter/{OWN_COUNTERS}", read_only=True, part=OWN_COUNTERS),)


def _service(policy: ClusterPolicy, site: Site) -> Service:
    desired = policy.spec.dcgm_exporter.service
    about = assembly.metadata(policy, site, OperandName.DCGM_EXPORTER, OperandName.DCGM_EXPORTER.value)
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(METRICS_PORT)}
    return Service(
        api_version=workloads.CORE,
        metadata=replace(about, annotations=scraped),
        spec=ServiceSpec(
            selector={"app": OperandName.DCGM_EXPORTER.value},
            ports=(ServicePort(name="gpu-metrics", port=METRICS_PORT),),
            type=desired.type if desired is not None else "",
            internal_traffic_policy=desired.internal_traffic_policy if desired is not None else "",
        ),
    )
