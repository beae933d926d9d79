"""Problems of a cluster or a node, and of KubeVirt's configuration, for which the controller does not serve it."""

from collections.abc import Collection

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

NOTHING_NEEDED = "if this persists,"
MOST_NAMES, LONGEST_NAME = 10, 80


def foreign_provider(name: str, offered_as: str, where: str) -> Reason:
    """KubeVirt's own plugin offers the same devices."""
    called = "" if offered_as == name else f" as {offered_as}"
    message = f"is offered by KubeVirt itself{called}, so gpuvirt does not offer it"
    fix = "once no VM uses it, set externalResourceProvider: true in the entry, or remove the entry"
    seen = (Seen(where, "externalResourceProvider is not true"),)
    return Reason(ReasonCode.FOREIGN_PROVIDER, name, message, seen, fix)


def state_unknown(where: str, message: str, fix: str, *seen: Seen) -> Reason:
    """The controller neither writes nor removes what depends on an unknown state."""
    return Reason(ReasonCode.KUBEVIRT_STATE_UNKNOWN, where, message, seen, fix)


def shortened(names: Collection[str]) -> str:
    """Return names that any tenant can write, shortened."""
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in sorted(names)[:MOST_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def gate_disabled(where: str, gate: str) -> Reason:
    """An administrator has disabled a gate that is needed."""
    message = (
        f"has the required feature gate {gate} in disabledFeatureGates; the controller does not remove it from there"
    )
    fix = f"remove {gate} from developerConfiguration.disabledFeatureGates"
    return Reason(ReasonCode.GATE_DISABLED, where, message, fix=fix)


def pod_missing(subject: str, more: str, *seen: Seen, vmi: str | None = None) -> Reason:
    """A taint may keep a DaemonSet's pod away. `vmi`: the arguments for kubectl that name the VMI of a missing pod."""
    pod = "pod on this node"
    fix = "compare the node's taints (kubectl describe node) with daemonsets.tolerations of the ClusterPolicy"
    if vmi is not None:
        pod, fix = "virt-launcher pod", f"kubectl describe vmi {vmi}; check that KubeVirt's virt-controller runs"
    return Reason(ReasonCode.POD_MISSING, subject, f"has no {pod}{more}", seen, fix)
