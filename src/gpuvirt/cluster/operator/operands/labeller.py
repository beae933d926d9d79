"""The DaemonSet of agents on nodes for containers, which only label their nodes (manifests/labeller.yaml)."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpuvirt.cluster.kinds.clusterpolicy import ClusterPolicy, SpecFault
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.operands import assembly, bases, overlay
from gpuvirt.cluster.operator.operands.site import RenderInputs


def labeller(policy: ClusterPolicy, site: RenderInputs) -> Iterator[Manifest | SpecFault]:
    """Yield the DaemonSet if the controller's settings ask for these labels."""
    if not site.settings.labels_vgpu_types:
        return
    found = overlay.base(policy, site, "labeller")
    context = bases.main_of(found).security_context
    if site.settings.namespace_sets_uid and context is not None:
        found = bases.with_main(found, security_context=replace(context, run_as_user=None, run_as_group=None))
    yield assembly.daemon_set(policy, site, found)
