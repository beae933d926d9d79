"""Why a VM on a node with GPUs of its own is not stopped for a phase's vGPU config, or not started after it."""

from gpuvirt.model.reasons.reason import Reason
from gpuvirt.model.reasons.reasoncodes import ReasonCode

_FIX = "shut down the VM, or wait until it ends; then the node gets the vGPU config"


def vm_not_stopped(vm: str, why: str, fix: str = _FIX) -> Reason:
    """The vGPU config of the phase waits for the VM."""
    return Reason(ReasonCode.VM_NOT_STOPPED, f"VM {vm}", f"is not stopped for the phase's vGPU config: {why}", fix=fix)


def vm_budget(vm: str, budget: str) -> Reason:
    """A PodDisruptionBudget counts the VM's pod."""
    why = f"PodDisruptionBudget {budget} allows no further disruption"
    return vm_not_stopped(vm, why, "change the budget, or set drain.onTimeout: Force")


def vm_pending(vm: str, step: str) -> Reason:
    """A step takes some time."""
    message = f"waits for the step {step} to take effect"
    return Reason(ReasonCode.STEP_PENDING, f"VM {vm}", message, fix="see the events of the VM and its VMI")
