"""NVIDIA's MPS daemon (manifests/mps.yaml): one DaemonSet, which nothing restarts."""

from collections.abc import Iterator

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.operands import agent, assembly, bases, overlay
from gpuvirt.cluster.operator.operands.site import RenderInputs


def mps_daemon(policy: ClusterPolicy, site: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet if the policy asks for it, beside the agent."""
    plugin = policy.spec.sandbox_device_plugin
    if not agent.is_desired(policy) or plugin.shares is None or plugin.shares.mps.enabled is not True:
        return
    secrets = assembly.secrets(site.settings.pull_secrets, plugin)
    found = bases.with_pod(overlay.base(policy, site, "mps"), image_pull_secrets=secrets)
    yield assembly.daemon_set(policy, site, found, owned=False)
