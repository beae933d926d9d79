"""NVIDIA's MPS daemon on nodes whose label asks for shares that it limits: one DaemonSet, which nothing restarts.

The end of the daemon ends all processes that use a GPU through it (seen with driver 580.159.04: each got error 806). So
the update strategy is OnDelete, no probe restarts it, it does not go with the policy, and its pod ends only once the
last client has: its process waits for them after SIGTERM (`apps.mps`), for a year at most.
"""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.podparts import (
    Affinity,
    Container,
    EnvVar,
    NodeAffinity,
    NodeSelector,
    PodSpec,
    Requirement,
    SecurityContext,
    SelectorTerm,
)
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.labels import ENFORCEMENT_LABEL, NODE_LABEL
from gpuvirt.cluster.operator.operands import agent, assembly, hostpaths
from gpuvirt.cluster.operator.operands.hostpaths import ANY_FOLDER, FOLDER, INTO, host, mount
from gpuvirt.cluster.operator.operands.site import OperandName, Site
from gpuvirt.model.desired.settings import Enforcement

GRACE_S = 365 * 24 * 3600
"""How long the kubelet waits for the last client before it ends the daemon."""


def mps_daemon(policy: ClusterPolicy, site: Site) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet if the policy asks for it, beside the agent."""
    shares = policy.spec.sandbox_device_plugin.shares
    if not agent.is_desired(policy) or shares is None or shares.mps.enabled is not True:
        return
    plugin, paths = policy.spec.sandbox_device_plugin, policy.spec.host_paths
    pod = PodSpec(
        service_account_name=agent.NAME,
        automount_service_account_token=False,
        node_selector={NODE_LABEL: "true", "kubernetes.io/os": "linux"},
        affinity=_affinity(),
        # The daemon knows its clients by their process ids.
        host_pid=True,
        termination_grace_period_seconds=GRACE_S,
        image_pull_secrets=assembly.secrets(site.settings.pull_secrets, plugin),
        containers=(_container(site),),
        volumes=(
            host("run", "/run/gpuvirt", ANY_FOLDER),
            host("driver-install-dir", hostpaths.driver_of(paths), ANY_FOLDER),
            host("host-root", hostpaths.root_of(paths), FOLDER),
        ),
    )
    labels = {"app.kubernetes.io/name": "gpuvirt", "app.kubernetes.io/component": "mps"}
    draft = assembly.Draft(
        OperandName.MPS, pod, tolerations=agent.TOLERATIONS, labels=labels, on_delete=True, owned=False
    )
    yield assembly.daemon_set(policy, site, draft)


def _affinity() -> Affinity:
    by_daemon = tuple(str(enforcement) for enforcement in Enforcement if enforcement.has_daemon)
    label = Requirement(key=ENFORCEMENT_LABEL, operator="In", values=by_daemon)
    terms = (SelectorTerm(match_expressions=(label,)),)
    return Affinity(node_affinity=NodeAffinity(required=NodeSelector(node_selector_terms=terms)))


def _container(site: Site) -> Container:
    return Container(
        name="daemon",
        image=site.image,
        image_pull_policy=site.settings.pull_policy,
        args=("mps", "run"),
        env=(EnvVar(name="GPUVIRT_SYSTEM_ROOT", value="/system"),),
        # It opens the device nodes of all GPUs, mounts its folder into the driver's root, and runs there.
        security_context=SecurityContext(privileged=True, read_only_root_filesystem=True),
        volume_mounts=(
            mount("run", "/run/gpuvirt"),
            mount("driver-install-dir", hostpaths.DRIVER_DIR, INTO),
            mount("host-root", "/system", INTO),
        ),
    )
