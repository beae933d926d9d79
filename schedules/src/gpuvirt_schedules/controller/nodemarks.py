"""The marks of schedules on nodes: cordons with their owner, and the taint of workers that leave soon."""

from collections.abc import Iterable

import msgspec

from gpuvirt.kube.kinds.core import Node, Taint
from gpuvirt_schedules.controller.workerobjects import ANNOUNCED, CORDONED_BY, cordoned_by, is_announced


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str
    labels: dict[str, str | None] = {}


class _Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    unschedulable: bool | msgspec.UnsetType | None = msgspec.UNSET
    taints: tuple[Taint, ...] | msgspec.UnsetType = msgspec.UNSET


class MarksPatch(msgspec.Struct, frozen=True):
    """A merge patch of a node of the version that was read."""

    metadata: _Metadata
    spec: _Spec


def marks_patch(
    version: str,
    taints: tuple[Taint, ...],
    schedule: str,
    *,
    cordon: bool | None,
    taint: bool | None,
    labels: Iterable[tuple[str, str | None]] = (),
) -> MarksPatch:
    """Return the patch that sets or removes a schedule's marks; None leaves a mark as it is, and removes a label.

    `version` and `taints` are those of the node that was read: taints are written as a whole list.
    """
    after: tuple[Taint, ...] | msgspec.UnsetType = msgspec.UNSET
    if taint is not None:
        others = tuple(other for other in taints if other.key != ANNOUNCED)
        after = (*others, Taint(ANNOUNCED, "PreferNoSchedule")) if taint else others
    changed: dict[str, str | None] = dict(labels)
    unschedulable: bool | msgspec.UnsetType | None = msgspec.UNSET
    if cordon is not None:
        changed[CORDONED_BY] = schedule if cordon else None
        unschedulable = True if cordon else None
    return MarksPatch(_Metadata(version, changed), _Spec(unschedulable, after))


def unmarking(node: Node, *, uncordons: bool, untaints: bool = True) -> MarksPatch | None:
    """Return the patch that removes marks of schedules from a node; None if there are none to remove.

    An admin's cordon has no owner, and stays.
    """
    cordon = False if uncordons and cordoned_by(node) else None
    taint = False if untaints and is_announced(node) else None
    if cordon is None and taint is None:
        return None
    return marks_patch(node.metadata.resource_version, node.spec.taints, "", cordon=cordon, taint=taint)
