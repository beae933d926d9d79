"""The faults in the profiles of a schedule: types and labels that can't be set, or can't be taken back."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import parse_label_key
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.model.reasons import schedules as reasons
from gpuvirt.model.workers.observed import WorkerNode
from gpuvirt.model.workers.spec import Schedule, WorkerProfile

_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
_RESERVED = re.compile(r"(?:[^/]*\.)?(?:kubernetes\.io|k8s\.io|gpuvirt\.io)/", re.ASCII)


def profile_faults(schedule: Schedule) -> Iterator[Reason]:
    """Yield what is wrong with profiles by themselves.

    A label that a selector of the schedule names would change by the switch which workers the switch has.
    """
    for position, phase in enumerate(schedule.phases):
        field = f"spec.phases[{position}].profiles"
        for vgpu_type, number in Counter(profile.vgpu_type for profile in phase.profiles).items():
            if not vgpu_type:
                yield reasons.spec_invalid(field, "has a profile without a vgpuType")
            elif number > 1:
                yield reasons.spec_invalid(field, f"has {number} profiles with the vgpuType {vgpu_type!r}")
        for at, profile in enumerate(phase.profiles):
            yield from _label_faults(schedule, profile, f"{field}[{at}].labels")


def _label_faults(schedule: Schedule, profile: WorkerProfile, field: str) -> Iterator[Reason]:
    for key, value in profile.labels:
        try:
            parse_label_key(key)
        except InvalidIdError as error:
            yield reasons.spec_invalid(field, str(error))
        if _RESERVED.match(key):
            yield reasons.spec_invalid(field, f"has the key {key!r}, whose domain is that of Kubernetes or gpuvirt")
        if not _VALUE.fullmatch(value):
            expected = "at most 63 letters, digits, '-', '_' and '.'"
            yield reasons.spec_invalid(field, f"has the value {value!r} of {key}, expected {expected}")
        phases = [phase.name for phase in schedule.phases if key in phase.selected_by]
        if phases:
            yield Reason(
                ReasonCode.PROFILE_LABEL_SELECTS,
                field,
                f"has the label {key}, by which these phases select workers: {', '.join(phases)}",
                fix="select workers by a label that the schedule does not set",
            )


def missing_profiles(nodes: Iterable[WorkerNode]) -> Iterator[Reason]:
    """Yield the workers that some of their phases give a vGPU type, and others leave with that of another phase."""
    for node in sorted(nodes, key=lambda node: node.name):
        lacking = sorted(node.phases - node.types.keys())
        if node.types and lacking:
            yield Reason(
                ReasonCode.PROFILE_MISSING,
                f"node {node.name}",
                f"has a vGPU type in phase {', '.join(sorted(node.types))}, but none in phase {', '.join(lacking)}",
                fix="add a profile that selects the node to each of its phases",
            )
