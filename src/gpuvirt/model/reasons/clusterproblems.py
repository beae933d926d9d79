"""Problems that keep the controller from serving a cluster or a node."""

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def pod_missing(subject: str, more: str, *seen: Seen, vmi: str | None = None) -> Reason:
    """A taint may keep a DaemonSet's pod away. `vmi`: the arguments for kubectl that name the VMI of a missing pod."""
    pod = "pod on this node"
    fix = "compare the node's taints (kubectl describe node) with daemonsets.tolerations of the ClusterPolicy"
    if vmi is not None:
        pod, fix = "virt-launcher pod", f"kubectl describe vmi {vmi}; check that KubeVirt's virt-controller runs"
    return Reason(ReasonCode.POD_MISSING, subject, f"has no {pod}{more}", seen, fix)
