"""Why a worker's VM might not be there any more when its phase begins, so that nothing is done for its schedule."""

from collections.abc import Sequence

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def worker_autoscaled(node: str, config_map: str, annotation: str) -> Reason:
    """The autoscaler removes nodes that are not ready for 20 minutes."""
    message = "is not excluded from the cluster autoscaler, which deletes VMs of nodes that are not ready"
    fix = f"kubectl annotate node {node} {annotation}=true; or delete the ConfigMap if no autoscaler runs any more"
    seen = (Seen("its ConfigMap", config_map),)
    return Reason(ReasonCode.WORKER_AUTOSCALED, f"node {node}", message, seen, fix)


def worker_health_checked(node: str, machine: str, checks: Sequence[str], fix: str) -> Reason:
    """A health check takes a worker that is away for a broken one."""
    message = f"is {machine}, which MachineHealthCheck {', '.join(checks)} replaces while it is not ready"
    return Reason(ReasonCode.WORKER_HEALTH_CHECKED, f"node {node}", message, fix=fix)


def machine_unknown(node: str, machine: str, annotation: str) -> Reason:
    """The objects may be in a management cluster."""
    message = f"is {machine}, which this cluster does not show, so its health checks are unknown"
    fix = (
        f"exclude the Machine from health checks in its management cluster, then kubectl annotate node {node}"
        f" {annotation}=true"
    )
    return Reason(ReasonCode.MACHINE_UNKNOWN, f"node {node}", message, fix=fix)


def coverage_unknown(problem: str) -> Reason:
    """The controller has the rights of an older chart."""
    message = f"can't be read, so gpuvirt does not know whether they would delete workers that are off: {problem}"
    fix = "give the controller the rights of docs/schedules.md"
    return Reason(ReasonCode.COVERAGE_UNKNOWN, "autoscaler or health checks", message, fix=fix)
