"""The reasons of what can fail between a connection and its hypervisor."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuvirt.hypervisors.messages import Problem
from gpuvirt.model.reasons import Reason, hypervisorproblems
from gpuvirt.model.schedules.hypervisor import Abilities, Ability

WORDINGS: Mapping[Problem, Callable[[str, str], Reason]] = {
    Problem.UNREACHABLE: hypervisorproblems.unreachable,
    Problem.NOT_TRUSTED: hypervisorproblems.not_trusted,
    Problem.WRONG_CREDENTIALS: hypervisorproblems.wrong_credentials,
    Problem.SESSION_LOST: hypervisorproblems.session_lost,
    Problem.FORBIDDEN: hypervisorproblems.forbidden,
    Problem.INCOMPLETE: hypervisorproblems.answer_incomplete,
    Problem.REFUSED: hypervisorproblems.refused,
    Problem.FAILED: hypervisorproblems.call_failed,
    Problem.NO_CAPACITY: hypervisorproblems.no_graphics_capacity,
    Problem.WRONG_POWER: hypervisorproblems.wrong_power_state,
    Problem.VM_MISSING: hypervisorproblems.vm_not_found,
    Problem.TOOLS_MISSING: hypervisorproblems.guest_tools_missing,
    Problem.NO_SUSPEND: hypervisorproblems.suspend_not_supported,
    Problem.TYPE_MISSING: hypervisorproblems.vgpu_type_not_offered,
    Problem.NOT_ONE_VGPU: hypervisorproblems.not_one_vgpu,
    Problem.NOT_INSTALLED: hypervisorproblems.back_end_missing,
    Problem.SILENT: hypervisorproblems.silent,
    Problem.ENDED: hypervisorproblems.connection_ended,
    Problem.LEASE_LOST: lambda server, _: hypervisorproblems.lease_lost(server),
}


def reason(problem: Problem, server: str, words: str) -> Reason:
    """Return the reason for a problem with a hypervisor."""
    return WORDINGS[problem](server, words)


def worded(abilities: Abilities, server: str) -> Abilities:
    """Return a child's abilities with codes and texts of the catalogue."""
    return replace(
        abilities,
        suspend=_worded(abilities.suspend, server),
        shut_down=_worded(abilities.shut_down, server),
        start=_worded(abilities.start, server),
        set_vgpu_type=_worded(abilities.set_vgpu_type, server),
    )


def _worded(ability: Ability, server: str) -> Ability:
    if not ability.code:
        return ability
    found = reason(Problem(ability.code), server, ability.text)
    return Ability(ability.is_possible, found.code, found.text)
