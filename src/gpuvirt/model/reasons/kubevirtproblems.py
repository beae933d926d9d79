"""Problems of KubeVirt's configuration, for which the controller does not write it."""

from collections.abc import Collection, Sequence

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


def not_read_completely(problem: str) -> Reason:
    """The objects of a kind could not be listed."""
    message = "could not be read completely; gpuvirt removes nothing until it can"
    fix = "see the API server's answer; an upgrade of the Helm release brings the roles that this version needs"
    return state_unknown("KubeVirt", message, fix, Seen("", problem))


def requests_unknown(where: str, kinds: Sequence[str]) -> Reason:
    """A list of permitted devices would refuse what it lacks."""
    message = f"gets no list of permitted devices until all requests of VMs are known; not read yet: {', '.join(kinds)}"
    return state_unknown(where, message, f"{NOTHING_NEEDED} let the controller list these kinds")


def hyper_converged_unknown(where: str) -> Reason:
    """HCO reverts what others write to its KubeVirt."""
    message = "belongs to HCO, and its HyperConverged has not been read yet; nothing is written until then"
    return state_unknown(where, message, f"{NOTHING_NEEDED} let the controller list hyperconvergeds.hco.kubevirt.io")


def hyper_converged_ambiguous(where: str, count: int) -> Reason:
    """HCO works with one object."""
    message = (
        f"belongs to HCO, which reverts the changes of others, and the cluster has {count} HyperConvergeds; expected"
        " one"
    )
    return state_unknown(where, message, "keep one HyperConverged; or, where HCO is gone, remove its label and owner")


def resource_not_permitted(where: str, names: Collection[str], *, has_list: bool) -> Reason:
    """A tenant can request any name; that must not decide what is permitted. A list refuses what it lacks."""
    message = (
        f"refuses VMs with {_shown(names)}, which they request and permittedHostDevices lacks; the list stays, since"
        " without it every device would be permitted"
    )
    fix = "if VMs may have the resource, add an entry for it to permittedHostDevices; otherwise correct the requests"
    if not has_list:
        message = (
            f"gets no list of permitted devices, since gpuvirt can't name {_shown(names)} in it: VMs request these,"
            " and other programs offer them; without a list every device is permitted"
        )
        fix = "write permittedHostDevices yourself, with an entry for each of them; gpuvirt then adds what it offers"
    return Reason(ReasonCode.RESOURCE_NOT_PERMITTED, where, message, fix=fix)


def _shown(names: Collection[str]) -> str:
    """Return names that any tenant can write, shortened."""
    shown = [name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..." for name in sorted(names)[:MOST_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def grace_gates_missing(resource: str, where: str, gates: Sequence[str]) -> Reason:
    """KubeVirt decides by the id in the entry, and admits the same VM without any list."""
    return Reason(
        ReasonCode.GRACE_GATES_MISSING,
        resource,
        "gets no entry in permittedHostDevices: it is a Grace GPU, and with its id there KubeVirt refuses VMs that"
        f" request it while the feature gates {', '.join(gates)} are off",
        (Seen(f"{where} $.spec.configuration.developerConfiguration.featureGates", f"no {', '.join(gates)}"),),
        "enable the gates, and give such VMs dedicated CPUs; IOMMUFD first needs /dev/iommu on all nodes with VMs,"
        " since each virt-launcher pod then requests devices.kubevirt.io/iommufd, and libvirt 12.2 in virt-launcher",
    )


def selector_taken(resource: str, selector: str, why: str, place: str) -> Reason:
    """HCO takes each selector once."""
    message = (
        f"can't be permitted: its entry, or its selector {selector!r}, {why}, and HCO accepts each selector only once"
    )
    fix = "give the entry this name, or enable it; or have nodes offer the devices under one name"
    return Reason(ReasonCode.SELECTOR_TAKEN, resource, message, (Seen(place),), fix)


def mdev_deletion_risk(where: str, types: Collection[str]) -> Reason:
    """KubeVirt deletes mediated devices that its configuration does not name."""
    return Reason(
        ReasonCode.MDEV_DELETION_RISK,
        where,
        f"lets KubeVirt delete mediated devices of the types {', '.join(sorted(types))}, so none are created",
        (
            Seen("mediatedDevicesConfiguration.enabled", "is not false"),
            Seen("gate DisableMDEVConfiguration", "is not set"),
            Seen("permittedHostDevices.mediatedDevices", "no entry with externalResourceProvider: true for them"),
        ),
        "set one of these three fields",
    )


def mdevs_of_kubevirt(where: str, types: Sequence[str], nodes: Sequence[str]) -> Reason:
    """KubeVirt fills a GPU without mediated devices before gpuvirt does, or after a VM has ended."""
    return Reason(
        ReasonCode.MDEVS_OF_KUBEVIRT,
        where,
        f"creates mediated devices of the types {_shown(types)} on GPUs without any, also on {_shown(nodes)}, where"
        " gpuvirt creates vGPUs; gpuvirt offers those of KubeVirt, too",
        (Seen(f"{where} mediatedDevicesConfiguration", ", ".join(types[:MOST_NAMES])),),
        "let only one of them create vGPUs: set mediatedDevicesConfiguration.enabled to false, or remove the types, or"
        " name only other nodes in nodeMediatedDeviceTypes",
    )


def gate_disabled(where: str, gate: str) -> Reason:
    """An administrator has disabled a gate that is needed."""
    message = (
        f"has the required feature gate {gate} in disabledFeatureGates; the controller does not remove it from there"
    )
    fix = f"remove {gate} from developerConfiguration.disabledFeatureGates"
    return Reason(ReasonCode.GATE_DISABLED, where, message, fix=fix)


def too_old(where: str) -> Reason:
    """No setting keeps this version from deleting mediated devices."""
    message = (
        "belongs to a KubeVirt that deletes mediated devices which it did not create, and has no setting that prevents"
        " this"
    )
    fix = "update KubeVirt to 0.58.2, 0.59.1 or later"
    return Reason(ReasonCode.KUBEVIRT_TOO_OLD, where, message, fix=fix)


def still_referenced(where: str, what: Sequence[str]) -> Reason:
    """Removing the entries would refuse VMs."""
    message = f"keeps {', '.join(what)}, which VMs or pods request, or may request"
    fix = "delete those VMs and pods and run the undo again, or keep the entries"
    return Reason(ReasonCode.RESOURCE_STILL_REFERENCED, where, message, fix=fix)


def not_managed(where: str, annotation: str) -> Reason:
    """The settings forbid the controller to write."""
    message = "lacks fields that VMs need to use the offered devices, and the controller is not permitted to write it"
    fix = "write what the dry run shows, or permit the controller to write"
    seen = (Seen("", f"the annotation {annotation}, or the controller's settings"),)
    return Reason(ReasonCode.KUBEVIRT_NOT_MANAGED, where, message, seen, fix)


def config_reverted(where: str, times: int) -> Reason:
    """Another program writes the same object."""
    return Reason(
        ReasonCode.CONFIG_REVERTED,
        where,
        f"was written {times} times and reverted each time; it is not written again, and no more vGPUs are created",
        (Seen("generations of the object", "the newer lack fields of the older"),),
        "have the program that writes it (often a GitOps tool) write what the dry run shows, or omit these fields",
    )
