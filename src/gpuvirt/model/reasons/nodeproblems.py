"""Problems of the agent itself, of its files, and of the kubelet and the API server as the agent observes them."""

from collections.abc import Collection

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

NAME_KUBELET_DIR = "start the kubelet, or name its folder with --kubelet-dir"
NO_LISTENER = "no process listens at it"
PROCESSES = "look for processes in state D (ps axo pid,stat,wchan:30,cmd), and see the kernel's log (dmesg)"
NOT_REVIEWED = Seen("GpuNode $.spec.reviewed and $.spec.withheld", "no such name")


def kubelet_away(subject: str, socket: object, *, is_left: bool = False) -> Reason:
    """No resource can be registered; `is_left`: the socket exists, of a kubelet that has ended."""
    problem = "has no listener" if is_left else "does not exist"
    seen = Seen(str(socket), NO_LISTENER) if is_left else Seen.absent(str(socket))
    message = f"can't be registered: the kubelet's socket {socket} {problem}"
    return Reason(ReasonCode.KUBELET_AWAY, subject, message, (seen,), NAME_KUBELET_DIR)


def not_registered(resource: str, error: str | None = None) -> Reason:
    """The kubelet does not know a resource yet."""
    seen = (Seen("", error),) if error is not None else ()
    message = "is not registered with the kubelet yet; the agent tries again"
    return Reason(ReasonCode.NOT_REGISTERED, resource, message, seen, "see the kubelet's log: journalctl -u kubelet")


def socket_taken(resource: str, error: str) -> Reason:
    """Another device plugin serves the resource."""
    message = "can't be registered: another program listens at its socket"
    fix = "stop the other device plugin (NVIDIA's kubevirt-gpu-device-plugin or sandbox-device-plugin)"
    return Reason(ReasonCode.SOCKET_TAKEN, resource, message, (Seen("", error),), fix)


def scan_blocked(subject: str, error: str, effect: str) -> Reason:
    """A read sleeps in the kernel."""
    return Reason(ReasonCode.SCAN_BLOCKED, subject, f"can't be read; {effect}", (Seen("", error),), PROCESSES)


def scan_failed(error: str) -> Reason:
    """An observation of the host failed."""
    message = "can't be read; its last known state is kept"
    return Reason(ReasonCode.SCAN_FAILED, "this host", message, (Seen("", error),), "see the agent's log")


def cdi_not_written(path: object, error: str, *, is_share: bool = False) -> Reason:
    """Kata finds devices by their CDI specs, and a container runtime finds a container's share of a GPU."""
    message, fix = "can't be written, so Kata finds no devices; KubeVirt is not affected", "make the folder writable"
    if is_share:
        message = "can't be written, so its container can't start"
    else:
        fix += ", or set cdi: none"
    return Reason(ReasonCode.CDI_NOT_WRITTEN, str(path), message, (Seen("", error),), fix)


def ledger_lost(
    path: object, what: str, consequence: str = "the kubelet reports allocations; give renamed resources an alias"
) -> Reason:
    """The ledger, or another file with what the agent must remember, could not be used."""
    return _lost(ReasonCode.LEDGER_LOST, path, what, consequence)


def record_history_lost(path: object, what: str) -> Reason:
    """The file about the kubelet's checkpoint could not be used."""
    consequence = "an existing checkpoint of the kubelet is used; without one, the allocations are unknown"
    return ledger_lost(path, what, consequence)


def desired_state_lost(path: object, what: str) -> Reason:
    """The file with the desired state could not be used."""
    consequence = "the API server has the desired state; until it answers, vGPUs stay as they are"
    return _lost(ReasonCode.DESIRED_STATE_LOST, path, what, consequence)


def drivers_lost(path: object, name: str) -> Reason:
    """The driver journal could not be used."""
    message = "was damaged or can't be read; the drivers and overrides that it recorded are unknown"
    consequence = "GPUs return to the driver that modules.alias names; the next boot clears all overrides"
    seen = Seen("", f"a damaged file is kept beside it, as {name}.damaged")
    return _lost(ReasonCode.DRIVERS_LOST, path, message, consequence, seen)


def tenancies_lost(path: object) -> Reason:
    """The file with the tenants of GPUs was damaged or deleted in this boot."""
    message = "was damaged or deleted; the tenants of GPUs in this boot are unknown"
    consequence = "GPUs that the kernel can't reset are withheld until the host is rebooted"
    return _lost(ReasonCode.TENANCIES_LOST, path, message, consequence)


def tenancies_not_written(path: object, error: str) -> Reason:
    """A restart of the agent would lose who had a GPU."""
    consequence = "GPUs that the kernel can't reset are not allocated until it can"
    return _not_written(ReasonCode.TENANCIES_NOT_WRITTEN, path, error, consequence)


def _lost(code: ReasonCode, path: object, message: str, consequence: str, *seen: Seen) -> Reason:
    return Reason(code, str(path), message, seen, f"no action needed: {consequence}")


def ledger_not_written(
    path: object, error: str, consequence: str = "after a restart only the kubelet reports names and allocations"
) -> Reason:
    """A restart of the agent would lose what the ledger, or another such file, has."""
    return _not_written(ReasonCode.LEDGER_NOT_WRITTEN, path, error, consequence)


def record_history_not_written(path: object, error: str) -> Reason:
    """A restart of the agent would lose whether the kubelet's checkpoint existed."""
    consequence = "after a restart the agent does not know whether the kubelet's checkpoint was lost"
    return ledger_not_written(path, error, consequence)


def desired_state_not_written(path: object, error: str) -> Reason:
    """A restart of the agent would lose the desired state."""
    consequence = "after a restart only the API server has the desired state of vGPUs"
    return _not_written(ReasonCode.DESIRED_STATE_NOT_WRITTEN, path, error, consequence)


def _not_written(code: ReasonCode, path: object, error: str, consequence: str) -> Reason:
    fix = "free space, or mount the folder writable"
    return Reason(code, str(path), f"can't be written; {consequence}", (Seen("", error),), fix)


def config_unread(path: object, error: str) -> Reason:
    """The file of vGPU configs can't be used."""
    message = "can't be read, so the previous vGPU configs stay in force"
    return config_invalid(str(path), message, "make it a readable file in UTF-8", Seen("", error))


def config_invalid(where: str, problem: str, fix: str | None, *seen: Seen) -> Reason:
    """A value of the desired state can't be used."""
    return Reason(ReasonCode.CONFIG_INVALID, where, problem, seen, fix)


def api_forbidden(what: str, error: str) -> Reason:
    """The agent lacks a permission."""
    message = f"does not permit the agent {what}; the agent tries again and changes nothing until then"
    fix = "give the agent's service account the roles of deploy/node.yaml"
    return Reason(ReasonCode.API_FORBIDDEN, "the API server", message, (Seen("", error),), fix)


def api_server_away(what: str, error: str) -> Reason:
    """The API server does not answer."""
    message = (
        f"does not answer the agent, which needs it for {what}; the agent tries again and changes nothing until then"
    )
    return not_answered("the API server", message, Seen("", error))


def not_answered(subject: str, message: str, *seen: Seen) -> Reason:
    """Only the API server knows what the agent needs."""
    fix = "start the API server if it is down; else check the network between this node and the API server"
    return Reason(ReasonCode.API_SERVER_AWAY, subject, message, seen, fix)


def awaits_controller(name: str, most_s: float) -> Reason:
    """KubeVirt may offer the resource itself."""
    message = "is not registered yet: the controller has not reported whether KubeVirt offers it itself"
    fix = f"no action needed: the report takes a second, and after {most_s:.0f} s the agent registers without it"
    return Reason(ReasonCode.AWAITS_CONTROLLER, name, message, (NOT_REVIEWED,), fix)


def controller_silent(names: Collection[str], most_s: float) -> Reason:
    """The resource was registered without the controller's report."""
    return Reason(
        ReasonCode.CONTROLLER_SILENT,
        ", ".join(names),
        f"is offered, but the controller has not reported within {most_s:.0f} s whether KubeVirt offers it itself",
        (NOT_REVIEWED,),
        "see why the controller does not answer: kubectl get lease gpuvirt-controller, the controller's log, and"
        " KubeVirtConfigured of the ClusterPolicy",
    )
