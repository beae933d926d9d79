"""Why a VM on a node with GPUs of its own is not stopped for a phase's vGPU config, or not started after it."""

from collections.abc import Sequence

from gpuvirt.model.reasons.reason import Reason, without_code
from gpuvirt.model.reasons.reasoncodes import ReasonCode

_FIX = "shut down the VM, or wait until it ends; then the node gets the vGPU config"


def vm_not_stopped(vm: str, why: str, fix: str = _FIX) -> Reason:
    """The vGPU config of the phase waits for the VM."""
    return Reason(ReasonCode.VM_NOT_STOPPED, f"VM {vm}", f"is not stopped for the phase's vGPU config: {why}", fix=fix)


def vm_not_alone(vm: str, node: str, others: Sequence[str]) -> Reason:
    """The GPU would keep its vGPUs, and the VM would be off for nothing."""
    why = f"other users of its GPU on node {node} stay: {', '.join(others)}"
    return vm_not_stopped(vm, why, "stop those users, or see what they wait for; then all VMs of the GPU are stopped")


def vm_budget(vm: str, budget: str) -> Reason:
    """A PodDisruptionBudget counts the VM's pod."""
    why = f"PodDisruptionBudget {budget} allows no further disruption"
    return vm_not_stopped(vm, why, "change the budget, or set drain.onTimeout: Force")


def vm_budget_settles(vm: str, budget: str) -> Reason:
    """The budget may not count a VM yet that was stopped just now."""
    why = f"PodDisruptionBudget {budget} may not count a VM yet that was just stopped"
    return vm_not_stopped(vm, why, "wait for some seconds")


def vm_pending(vm: str, step: str) -> Reason:
    """A step takes some time."""
    message = f"waits for the step {step} to take effect"
    return Reason(ReasonCode.STEP_PENDING, f"VM {vm}", message, fix="see the events of the VM and its VMI")


def vm_call_refused(vm: str, code: str, text: str) -> Reason:
    """KubeVirt's own words. `code` is the back end's, if the catalogue has it."""
    known = ReasonCode.named(code) or ReasonCode.CALL_REFUSED
    return Reason(known, f"VM {vm}", f"stays as it is, since KubeVirt refuses: {without_code(code, text)}")
