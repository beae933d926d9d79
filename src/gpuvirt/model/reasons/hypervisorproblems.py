"""Problems between gpuvirt and a hypervisor."""

from collections.abc import Mapping

from gpuvirt.model.reasons.reason import Reason, Seen
from gpuvirt.model.reasons.reasoncodes import ReasonCode

_WORDS: Mapping[ReasonCode, tuple[str, str]] = {
    ReasonCode.HYPERVISOR_UNREACHABLE: (
        "can't be reached",
        "check that the hypervisor runs, `server` in the Secret, and the network policies of the controller",
    ),
    ReasonCode.HYPERVISOR_NOT_TRUSTED: (
        "presents no certificate that `ca` verifies",
        "put the PEM certificate that signs the hypervisor's into `ca` of the Secret, and its name into `server`",
    ),
    ReasonCode.WRONG_CREDENTIALS: (
        "refuses the credentials",
        "correct `user` and `password`, or `certificate` and `key`, of the Secret",
    ),
    ReasonCode.HYPERVISOR_SESSION_LOST: (
        "ends each session at once",
        "check the hypervisor's session limit for this user; gpuvirt does nothing until the hypervisor answers",
    ),
    ReasonCode.HYPERVISOR_FORBIDDEN: (
        "denies the request to this user",
        "give the user the privileges that docs/hypervisors.md lists, on the worker VMs",
    ),
    ReasonCode.HYPERVISOR_ANSWER_INCOMPLETE: (
        "gave an incomplete answer",
        "check whether the user may read the VM; if so, pack a support archive: gpuvirt support",
    ),
    ReasonCode.HYPERVISOR_SILENT: (
        "did not answer in time",
        "check the hypervisor's load; gpuvirt reads the VMs again before it repeats a call",
    ),
    ReasonCode.HYPERVISOR_CONNECTION_ENDED: (
        "lost its connection, because the connected process of gpuvirt has ended",
        (
            "no action needed if it happens once: gpuvirt reads the VMs again before it repeats a call; otherwise check"
            " the memory limit"
        ),
    ),
    ReasonCode.HYPERVISOR_REFUSED: (
        "refused the call",
        "see the VM's events in the hypervisor",
    ),
    ReasonCode.HYPERVISOR_CALL_FAILED: (
        "failed during the call",
        "see the VM's events in the hypervisor; gpuvirt reads the VMs again before it repeats a call",
    ),
    ReasonCode.NO_GRAPHICS_CAPACITY: (
        "has no GPU with room for the VM's vGPU",
        "find the VM that uses the GPU: it is not a worker of this schedule, or has not been suspended",
    ),
    ReasonCode.WRONG_POWER_STATE: (
        "reports that the VM is in another state",
        "no action needed if it happens once: gpuvirt reads the VM again",
    ),
    ReasonCode.VM_NOT_FOUND: (
        "shows no such VM",
        "check that the VM exists, and that the user may read it",
    ),
    ReasonCode.GUEST_TOOLS_MISSING: (
        "can't ask the guest to shut down",
        "install open-vm-tools or qemu-guest-agent in the worker, or set `leave: Suspend`",
    ),
    ReasonCode.SUSPEND_NOT_SUPPORTED: (
        "can't suspend the VM",
        "set `leave: ShutDown`, or install a hypervisor and a vGPU manager that can suspend such VMs",
    ),
    ReasonCode.VGPU_TYPE_NOT_OFFERED: (
        "does not list the VM's vGPU type",
        "see the host's GPUs and its vGPU manager; the host may be in maintenance",
    ),
    ReasonCode.NOT_ONE_VGPU: (
        "can't change the vGPU's type",
        "give the VM exactly one vGPU",
    ),
    ReasonCode.BACK_END_MISSING: (
        "can't be reached: its library is not installed",
        "pip install 'gpuvirt-schedules[vsphere]' or 'gpuvirt-schedules[libvirt]'",
    ),
    ReasonCode.LEASE_LOST: (
        "got no request, because this controller does not lead",
        "see the controller's log for its lease; another controller may lead",
    ),
}
"""The message, and the fix, of each code."""


def hypervisor_problem(code: ReasonCode, server: str, words: str) -> Reason:
    """Return the reason of one of these codes. `words` are the hypervisor's own, without credentials."""
    message, fix = _WORDS[code]
    return Reason(code, f"the hypervisor {server}", message, (Seen("", words),) if words else (), fix)
