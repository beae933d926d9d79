"""Problems that keep the controller from serving a cluster or a node."""

from gpuvirt.model.reasons.nodeproblems import config_invalid
from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def other_operator(lease: str, option: str) -> Reason:
    """Two operators would deploy to the same nodes."""
    message = "runs in this cluster, and both would deploy to the same nodes; the controller changes nothing"
    fix = f"remove the other operator, or run the controller with {option} to give it the nodes for VMs"
    return Reason(ReasonCode.OTHER_OPERATOR, "NVIDIA's GPU operator", message, (Seen("", lease),), fix)


def policy_invalid(where: str, problem: str) -> Reason:
    """A field of the ClusterPolicy can't be used."""
    return config_invalid(where, problem, "correct the field; the controller changes nothing until then")


def components_off(subject: str, follows: str, where: str, labels: str) -> Reason:
    """Nothing offers the node's GPUs."""
    verb = "are" if "," in subject else "is"
    message = f"{verb} disabled for this node, so {follows}"
    fix = f"enable it, or label the node {labels}"
    return Reason(ReasonCode.COMPONENTS_OFF, subject, message, (Seen("", where),), fix)


def image_unknown() -> Reason:
    """The controller deploys its own image."""
    message = "was started without the image to deploy, so it deploys nothing to this node"
    fix = "run the controller with --image or GPUVIRT_IMAGE, as the chart does"
    return Reason(ReasonCode.IMAGE_UNKNOWN, "the controller", message, fix=fix)


def pod_missing(subject: str, more: str, *seen: Seen, vmi: str | None = None) -> Reason:
    """A taint may keep a DaemonSet's pod away. `vmi`: the arguments for kubectl that name the VMI of a missing pod."""
    pod = "pod on this node"
    fix = "compare the node's taints (kubectl describe node) with daemonsets.tolerations of the ClusterPolicy"
    if vmi is not None:
        pod, fix = "virt-launcher pod", f"kubectl describe vmi {vmi}; check that KubeVirt's virt-controller runs"
    return Reason(ReasonCode.POD_MISSING, subject, f"has no {pod}{more}", seen, fix)


def os_unknown(driver: str, labels: str, label: str) -> Reason:
    """The operating system selects the image."""
    message = "can't be deployed to this node: the operating system selects its image, and no label names it"
    fix = f"run gpuvirt discover or NFD, or label the node by hand: {label}=ubuntu22.04"
    return Reason(ReasonCode.OS_UNKNOWN, driver, message, (Seen.absent(f"label {labels}"),), fix)
