"""Controllers that would delete or replace the VM of a worker while it is away: cluster autoscaler and health checks.

Source: cluster-autoscaler, core/scaledown/eligibility: it never removes a node with the annotation
`cluster-autoscaler.kubernetes.io/scale-down-disabled: "true"`; it writes its status to a ConfigMap.
"""

from collections.abc import Iterable, Iterator

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.reasons import Reason, ReasonCode, Seen

SCALE_DOWN_DISABLED = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
MAY_LEAVE = "gpuvirt.io/may-leave"
"""Annotation of nodes. By `true` an admin states that nothing deletes or replaces the VM while it is away."""


class MachineCoverage(msgspec.Struct, frozen=True):
    """The Machine of a worker's node, and the health checks that replace it."""

    machine: str
    """Kind, group, namespace and name, in words."""
    checks: tuple[str, ...] | None
    """Namespace and name of each; None where the Machine or the checks are unknown."""
    fix: str
    """How to exclude the Machine from its checks."""


class WorkerCoverage(msgspec.Struct, frozen=True):
    """The annotations of one worker's node about its deletion, and its Machines with their health checks."""

    node: NodeName
    may_leave: bool = False
    is_never_scaled_down: bool = False
    machines: tuple[MachineCoverage, ...] = ()


def coverage_faults(workers: Iterable[WorkerCoverage], autoscaler: str | None) -> Iterator[Reason]:
    """Yield the workers whose VMs may be deleted while they are away.

    `autoscaler` is namespace and name of the ConfigMap of a cluster autoscaler; None if the cluster has none.
    """
    for worker in sorted(workers, key=lambda worker: worker.node):
        if worker.may_leave:
            continue
        if autoscaler is not None and not worker.is_never_scaled_down:
            yield Reason(
                ReasonCode.WORKER_AUTOSCALED,
                f"node {worker.node}",
                "is not excluded from the cluster autoscaler, which deletes VMs of nodes that are not ready",
                (Seen("its ConfigMap", autoscaler),),
                f"kubectl annotate node {worker.node} {SCALE_DOWN_DISABLED}=true; or delete the ConfigMap if no"
                " autoscaler runs any more",
            )
        for covered in worker.machines:
            if covered.checks is None:
                yield Reason(
                    ReasonCode.MACHINE_UNKNOWN,
                    f"node {worker.node}",
                    f"is {covered.machine}, which this cluster does not show, so its health checks are unknown",
                    fix="exclude the Machine from health checks in its management cluster, then kubectl annotate node"
                    f" {worker.node} {MAY_LEAVE}=true",
                )
            elif covered.checks:
                yield Reason(
                    ReasonCode.WORKER_HEALTH_CHECKED,
                    f"node {worker.node}",
                    f"is {covered.machine}, which MachineHealthCheck {', '.join(covered.checks)} replaces while it is"
                    " not ready",
                    fix=covered.fix,
                )
