"""The DaemonSet of agents on nodes for containers, which only label their nodes with the types of their vGPUs.

NVIDIA's device plugin gives each vGPU of such a worker VM as `nvidia.com/gpu: 1`, and pods choose the type by
`nodeSelector`. The agent observes without privileges: it has the host's `/sys` and `/proc/driver` as any container, no
device node, no folder of the host, and the rights of the account of agents.
"""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault, Toleration
from gpuvirt.cluster.kinds.podparts import (
    Capabilities,
    Container,
    ContainerPort,
    EmptyDirSource,
    HttpGet,
    PodSpec,
    ProbeSpec,
    ResourceNeeds,
    SeccompProfile,
    SecurityContext,
    Volume,
)
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.labels import AGENT_LABELS, NODE_LABEL
from gpuvirt.cluster.operator.operands import agent, assembly, hostpaths
from gpuvirt.cluster.operator.operands.containernodes import NO_GPUS
from gpuvirt.cluster.operator.operands.hostpaths import mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site

TOLERATIONS = (Toleration(operator="Exists"),)
"""Tainted nodes have GPUs, too."""
USER = 65532
NEEDS = ResourceNeeds(requests={"cpu": "5m", "memory": "48Mi"}, limits={"memory": "128Mi"})


def labeller(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet if the controller's settings ask for these labels."""
    if not site.settings.labels_vgpu_types:
        return
    pod = PodSpec(
        service_account_name=agent.NAME,
        node_selector={NODE_LABEL: AGENT_LABELS, "kubernetes.io/os": "linux"},
        termination_grace_period_seconds=5,
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets),
        containers=(_container(site),),
        volumes=(Volume(name="state", empty_dir=EmptyDirSource()),),
    )
    labels = {"app.kubernetes.io/name": "gpuvirt", "app.kubernetes.io/component": "node"}
    yield assembly.daemon_set(
        policy, site, assembly.Draft(OperandName.LABELLER, pod, tolerations=TOLERATIONS, labels=labels)
    )


def _container(site: Site) -> Container:
    return Container(
        name="agent",
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("node", "--labels-only", "--log-format=json"),
        env=(hostpaths.field_of("GPUVIRT_NODE_NAME", "spec.nodeName"), NO_GPUS),
        security_context=_unprivileged(site),
        ports=(ContainerPort(name="metrics", container_port=agent.METRICS),),
        liveness_probe=ProbeSpec(
            http_get=HttpGet(path="/healthz", port="metrics"), period_seconds=30, timeout_seconds=5
        ),
        readiness_probe=ProbeSpec(http_get=HttpGet(path="/readyz", port="metrics"), period_seconds=5),
        resources=NEEDS,
        volume_mounts=(mount("state", "/var/lib/gpuvirt"),),
    )


def _unprivileged(site: Site) -> SecurityContext:
    uid = None if site.settings.namespace_sets_uid else USER
    return SecurityContext(
        read_only_root_filesystem=True,
        run_as_user=uid,
        run_as_group=uid,
        run_as_non_root=True,
        allow_privilege_escalation=False,
        capabilities=Capabilities(drop=("ALL",)),
        seccomp_profile=SeccompProfile(type="RuntimeDefault"),
    )
