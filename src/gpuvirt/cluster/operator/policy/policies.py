"""Which ClusterPolicy counts, and what it says in the controller's own words.

Contract: NVIDIA's operator, whose switches these are: null is off for what concerns machines, and the chart writes down
what is on. Of several policies the oldest counts, and of equally old ones the first by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from gpuvirt.cluster.kinds.clusterpolicy import KIND, ClusterPolicy, SpecFault, StoredPolicy, read_policy
from gpuvirt.cluster.kinds.vmoperands import SandboxWorkloads
from gpuvirt.cluster.operator.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.cluster.operator.nodes.labels import Around
from gpuvirt.cluster.operator.nodes.placement import Defaults
from gpuvirt.cluster.operator.nodes.resolve import VgpuSwitch
from gpuvirt.cluster.operator.operands import agent
from gpuvirt.model.desired.vgpudefaults import DEFAULT
from gpuvirt.model.desired.workload import Workload


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy that counts, and those that don't."""

    stored: StoredPolicy
    policy: ClusterPolicy | SpecFault
    ignored: tuple[StoredPolicy, ...] = ()


def choose(policies: Iterable[StoredPolicy]) -> Choice | None:
    """Return which policy counts; None where there is none."""
    ordered = sorted(policies, key=lambda one: (one.metadata.creation_timestamp, one.metadata.name))
    return Choice(ordered[0], read_policy(ordered[0]), tuple(ordered[1:])) if ordered else None


def beside(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy as it is beside NVIDIA's operator: nodes for machines are ours, though to it there are none."""
    return _with_machines(policy, replace(policy.spec.sandbox_workloads, default_workload=None))


def while_leaving(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy for as long as some node has machines: what serves them stays, though no more are wanted."""
    return _with_machines(policy, policy.spec.sandbox_workloads)


def _with_machines(policy: ClusterPolicy, sandbox: SandboxWorkloads) -> ClusterPolicy:
    return replace(policy, spec=replace(policy.spec, sandbox_workloads=replace(sandbox, enabled=True)))


def called(metadata_name: str) -> str:
    """Return what a policy is called in messages."""
    return f"{KIND} {metadata_name}"


def defaults_of(policy: ClusterPolicy) -> Defaults:
    """Return what the policy says of nodes that say nothing themselves."""
    sandbox = policy.spec.sandbox_workloads
    workload = Workload(sandbox.default_workload) if sandbox.default_workload is not None else Workload.CONTAINER
    return Defaults(bool(sandbox.enabled), workload, called(policy.metadata.name))


def carving_of(policy: ClusterPolicy, kubevirt: KubeVirtDecisions) -> VgpuSwitch:
    """Return what the policy says of modes and vGPU configs, and what KubeVirt keeps from being made or offered."""
    spec = policy.spec
    config = spec.vgpu_device_manager.config
    return VgpuSwitch(
        binds=bool(spec.vfio_manager.enabled),
        makes_vgpus=bool(spec.vgpu_device_manager.enabled),
        default=(config.default if config is not None else "") or DEFAULT,
        origin=called(policy.metadata.name),
        stopped_because=kubevirt.stopped_because,
        withheld=kubevirt.withheld,
    )


def around_of(policy: ClusterPolicy) -> Around:
    """Return what the policy says of labels beside what nodes are for."""
    spec = policy.spec
    mig = spec.mig_manager
    default = mig.config.default if mig.config is not None else ""
    return Around(
        mig_default=default if default == "all-disabled" and mig.enabled is not False else None,
        runs_agent=agent.is_desired(while_leaving(policy)),
    )
