"""Problems between gpuvirt and a hypervisor. `words` are the hypervisor's own, without credentials."""

from collections.abc import Sequence

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode


def unreachable(server: str, words: str) -> Reason:
    """Nothing listens, no route, no such name, or the connection broke."""
    fix = "check that the hypervisor runs, `server` in the Secret, and the network policies of the controller"
    return _reason(ReasonCode.HYPERVISOR_UNREACHABLE, server, "can't be reached", words, fix)


def not_trusted(server: str, words: str) -> Reason:
    """The server is another one, or the CA is."""
    fix = "put the PEM certificate that signs the hypervisor's into `ca` of the Secret, and its name into `server`"
    return _reason(ReasonCode.HYPERVISOR_NOT_TRUSTED, server, "presents no certificate that `ca` verifies", words, fix)


def wrong_credentials(server: str, words: str) -> Reason:
    """A wrong password must not be tried often: vCenter locks the user."""
    fix = "correct `user` and `password`, or `certificate` and `key`, of the Secret"
    return _reason(ReasonCode.WRONG_CREDENTIALS, server, "refuses the credentials", words, fix)


def credentials_incomplete(secret: str, keys: Sequence[str], expected: Sequence[str]) -> Reason:
    """A Secret has server, CA and credentials together, so that a schedule can't send them elsewhere."""
    message = f"lacks {', '.join(keys)}: expected the keys {', '.join(expected)}"
    fix = " ".join(("kubectl create secret generic NAME", *(f"--from-file={key}" for key in expected)))
    return Reason(ReasonCode.CREDENTIALS_INCOMPLETE, f"the Secret {secret}", message, fix=fix)


def credentials_missing(secret: str, namespace: str) -> Reason:
    """The Secret was deleted, or the schedule names another one than was created."""
    fix = f"create it in namespace {namespace}, or correct spec.hypervisor of the schedule"
    subject = f"the Secret {secret} of namespace {namespace}"
    return Reason(ReasonCode.CREDENTIALS_INCOMPLETE, subject, "does not exist", fix=fix)


def session_lost(server: str, words: str) -> Reason:
    """A login succeeds, and the next request has no session."""
    fix = "check the hypervisor's session limit for this user; gpuvirt does nothing until the hypervisor answers"
    return _reason(ReasonCode.HYPERVISOR_SESSION_LOST, server, "ends each session at once", words, fix)


def forbidden(server: str, words: str) -> Reason:
    """The user may log in."""
    fix = "give the user the privileges that docs/hypervisors.md lists, on the worker VMs"
    return _reason(ReasonCode.HYPERVISOR_FORBIDDEN, server, "denies the request to this user", words, fix)


def kubevirt_forbidden(server: str, words: str) -> Reason:
    """The chart gives the controller no right to VMs that its values do not name."""
    fix = "add the namespace to schedule.kubeVirtNamespaces of the chart"
    return _reason(ReasonCode.HYPERVISOR_FORBIDDEN, server, "denies the request to gpuvirt", words, fix)


def answer_incomplete(server: str, words: str) -> Reason:
    """The missing parts of an answer count as unknown."""
    fix = "check whether the user may read the VM; if so, pack a support archive: gpuvirt support"
    return _reason(ReasonCode.HYPERVISOR_ANSWER_INCOMPLETE, server, "gave an incomplete answer", words, fix)


def silent(server: str, words: str) -> Reason:
    """It is asked again with a new connection."""
    fix = "check the hypervisor's load; gpuvirt reads the VMs again before it repeats a call"
    return _reason(ReasonCode.HYPERVISOR_SILENT, server, "did not answer in time", words, fix)


def connection_ended(server: str, words: str) -> Reason:
    """It was killed, or its lease ended."""
    fix = (
        "no action needed if it happens once: gpuvirt reads the VMs again before it repeats a call; otherwise check"
        " the memory limit"
    )
    return _reason(
        ReasonCode.HYPERVISOR_CONNECTION_ENDED,
        server,
        "lost its connection, because the connected process of gpuvirt has ended",
        words,
        fix,
    )


def refused(server: str, words: str) -> Reason:
    """A fault without a code of its own."""
    fix = "see the VM's events in the hypervisor"
    return _reason(ReasonCode.HYPERVISOR_REFUSED, server, "refused the call", words, fix)


def call_failed(server: str, words: str) -> Reason:
    """The VMs show what it has done."""
    fix = "see the VM's events in the hypervisor; gpuvirt reads the VMs again before it repeats a call"
    return _reason(ReasonCode.HYPERVISOR_CALL_FAILED, server, "failed during the call", words, fix)


def no_graphics_capacity(server: str, words: str) -> Reason:
    """A GPU carries vGPUs of one size, and those of VMs that run."""
    fix = "find the VM that uses the GPU: it is not a worker of this schedule, or has not been suspended"
    return _reason(ReasonCode.NO_GRAPHICS_CAPACITY, server, "has no GPU with room for the VM's vGPU", words, fix)


def wrong_power_state(server: str, words: str) -> Reason:
    """The VM has changed since it was read."""
    fix = "no action needed if it happens once: gpuvirt reads the VM again"
    return _reason(ReasonCode.WRONG_POWER_STATE, server, "reports that the VM is in another state", words, fix)


def vm_not_found(server: str, words: str) -> Reason:
    """It was deleted, or is hidden."""
    fix = "check that the VM exists, and that the user may read it"
    return _reason(ReasonCode.VM_NOT_FOUND, server, "shows no such VM", words, fix)


def guest_tools_missing(server: str, words: str) -> Reason:
    """A guest without tools never hears of it."""
    fix = "install open-vm-tools or qemu-guest-agent in the worker, or set `leave: Suspend`"
    return _reason(ReasonCode.GUEST_TOOLS_MISSING, server, "can't ask the guest to shut down", words, fix)


def suspend_not_supported(server: str, words: str) -> Reason:
    """The host's vGPU manager decides."""
    fix = "set `leave: ShutDown`, or install a hypervisor and a vGPU manager that can suspend such VMs"
    return _reason(ReasonCode.SUSPEND_NOT_SUPPORTED, server, "can't suspend the VM", words, fix)


def vgpu_type_not_offered(server: str, words: str) -> Reason:
    """Another host of a cluster may offer it."""
    fix = "see the host's GPUs and its vGPU manager; the host may be in maintenance"
    return _reason(ReasonCode.VGPU_TYPE_NOT_OFFERED, server, "does not list the VM's vGPU type", words, fix)


def not_one_vgpu(server: str, words: str) -> Reason:
    """It would be ambiguous which vGPU changes."""
    fix = "give the VM exactly one vGPU"
    return _reason(ReasonCode.NOT_ONE_VGPU, server, "can't change the vGPU's type", words, fix)


def back_end_missing(server: str, words: str) -> Reason:
    """gpuvirt's image has all libraries."""
    fix = "pip install 'gpuvirt-schedules[vsphere]' or 'gpuvirt-schedules[libvirt]'"
    return _reason(ReasonCode.BACK_END_MISSING, server, "can't be reached: its library is not installed", words, fix)


def kubevirt_missing(server: str, words: str) -> Reason:
    """A schedule may name KubeVirt before it is installed."""
    fix = "install KubeVirt in this cluster, or correct spec.hypervisor of the schedule"
    return _reason(ReasonCode.BACK_END_MISSING, server, "is not installed: there are no VirtualMachines", words, fix)


def lease_lost(server: str) -> Reason:
    """Another controller may lead."""
    fix = "see the controller's log for its lease; another controller may lead"
    return _reason(ReasonCode.LEASE_LOST, server, "got no request, because this controller does not lead", "", fix)


def _reason(code: ReasonCode, server: str, message: str, words: str, fix: str) -> Reason:
    places = (Seen("", words),) if words else ()
    return Reason(code, f"the hypervisor {server}", message, places, fix)
