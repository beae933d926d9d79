"""The condition ConfigsKnown of a schedule: whether each phase names a vGPU config that exists, before it begins.

It stops nothing: as a fault it would hold all switches because of a ConfigMap that another team edits.
"""

from gpuvirt.kube.kinds.vgpuschedule import CONFIGS_KNOWN, VgpuSchedule
from gpuvirt.model.reasons import Reason, ReasonCode, joined

State = tuple[str, str, str]
"""Status, reason and message of a condition."""


def configs_state(stored: VgpuSchedule, unknown: tuple[Reason, ...] | None) -> State | None:
    """Return the condition's state; None for a schedule that has no vGPU configs, or while nothing is observed.

    `unknown` has the phases whose vGPU config is missing or not known; None keeps what the status says.
    """
    if not stored.config_phases:
        return None
    if unknown is None:
        return stored_state(stored)
    if not unknown:
        return "True", "ConfigsKnown", ""
    missing = tuple(reason for reason in unknown if reason.code is ReasonCode.CONFIG_INVALID)
    return ("False", *joined(missing)) if missing else ("Unknown", *joined(unknown))


def stored_state(stored: VgpuSchedule) -> State | None:
    """Return what the status says; None if it has no such condition."""
    found = (condition for condition in stored.status.conditions if condition.type == CONFIGS_KNOWN)
    return next(((condition.status, condition.reason, condition.message) for condition in found), None)


def is_outdated(stored: VgpuSchedule, unknown: tuple[Reason, ...] | None) -> bool:
    """Return whether the status says something else than what is observed."""
    return configs_state(stored, unknown) != stored_state(stored)
