"""The settings of a ClusterPolicy in the controller's types.

Contract: the switches of NVIDIA's operator: null is off for everything that concerns VMs, and the chart writes out what
is on.
"""

from msgspec.structs import replace

from gpuvirt.controller.kubevirt.decisions import KubeVirtDecisions
from gpuvirt.controller.nodes.labels import Around
from gpuvirt.controller.nodes.placement import Defaults
from gpuvirt.controller.nodes.resolve import VgpuSwitch
from gpuvirt.controller.operands import agent
from gpuvirt.kube.kinds.clusterpolicy import KIND, ClusterPolicy
from gpuvirt.kube.kinds.vmoperands import SandboxWorkloads
from gpuvirt.model.desired.vgpudefaults import DEFAULT
from gpuvirt.model.desired.workload import Workload


def beside(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy for use beside NVIDIA's operator: VM nodes are on, although that operator has them off."""
    return _with_vm_nodes(policy, replace(policy.spec.sandbox_workloads, default_workload=None))


def while_leaving(policy: ClusterPolicy) -> ClusterPolicy:
    """Return the policy for as long as a node still has VMs: their operands stay, even if VM nodes are switched off."""
    return _with_vm_nodes(policy, policy.spec.sandbox_workloads)


def _with_vm_nodes(policy: ClusterPolicy, sandbox: SandboxWorkloads) -> ClusterPolicy:
    return replace(policy, spec=replace(policy.spec, sandbox_workloads=replace(sandbox, enabled=True)))


def display_name(metadata_name: str) -> str:
    """Return a policy's name in messages: `ClusterPolicy cluster-policy`."""
    return f"{KIND} {metadata_name}"


def defaults_of(policy: ClusterPolicy) -> Defaults:
    """Return the policy's workload for nodes without a workload label."""
    sandbox = policy.spec.sandbox_workloads
    workload = Workload(sandbox.default_workload) if sandbox.default_workload is not None else Workload.CONTAINER
    return Defaults(bool(sandbox.enabled), workload, display_name(policy.metadata.name))


def vgpu_switch_of(policy: ClusterPolicy, kubevirt: KubeVirtDecisions) -> VgpuSwitch:
    """Return the policy's settings for modes and vGPU configs, and what KubeVirt's configuration forbids."""
    spec = policy.spec
    config = spec.vgpu_device_manager.config
    return VgpuSwitch(
        binds=bool(spec.vfio_manager.enabled),
        makes_vgpus=bool(spec.vgpu_device_manager.enabled),
        default=(config.default if config is not None else "") or DEFAULT,
        origin=display_name(policy.metadata.name),
        stopped_because=kubevirt.stopped_because,
        withheld=kubevirt.withheld,
    )


def around_of(policy: ClusterPolicy) -> Around:
    """Return the policy's settings for node labels."""
    spec = policy.spec
    mig = spec.mig_manager
    default = mig.config.default if mig.config is not None else ""
    return Around(
        mig_default=default if default == "all-disabled" and mig.enabled is not False else None,
        runs_agent=agent.is_desired(while_leaving(policy)),
    )
