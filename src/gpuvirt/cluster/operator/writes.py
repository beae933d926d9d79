"""What the controller writes, as data: each names the one object that it is about."""

from dataclasses import dataclass

from gpuvirt.cluster.keys import Patch
from gpuvirt.cluster.kinds.clusterpolicy import Status
from gpuvirt.cluster.kinds.workloads import Manifest
from gpuvirt.cluster.operator.kubevirt.planning import Plan
from gpuvirt.cluster.operator.resolve import AppliedGpuNode
from gpuvirt.cluster.resources import Resource


@dataclass(frozen=True, slots=True)
class Target:
    """One object, or a part of it."""

    resource: Resource
    name: str
    part: str = ""


@dataclass(frozen=True, slots=True)
class PatchNode:
    """Change labels and annotations of a node."""

    target: Target
    patch: Patch


@dataclass(frozen=True, slots=True)
class ApplyGpuNode:
    """Say what is wanted of a node's GPUs."""

    target: Target
    content: AppliedGpuNode


@dataclass(frozen=True, slots=True)
class PatchPolicyStatus:
    """Say how far a ClusterPolicy has come."""

    target: Target
    status: Status


@dataclass(frozen=True, slots=True)
class ApplyObject:
    """Have an object of an operand."""

    target: Target
    content: Manifest


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete an object, and none that has its name by then."""

    target: Target
    uid: str


@dataclass(frozen=True, slots=True)
class PatchKubeVirt:
    """Have KubeVirt, or HCO for it, permit what nodes offer."""

    target: Target
    plan: Plan


Write = ApplyObject | DeleteObject | PatchNode | ApplyGpuNode | PatchPolicyStatus | PatchKubeVirt
