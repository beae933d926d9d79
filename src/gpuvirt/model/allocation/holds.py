"""What is in somebody's hands, whatever resource name it went out under, and what that keeps from others."""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpuvirt.facts.ids import IommuGroup, ResourceName, slot_of
from gpuvirt.model.allocation.ledger import Entry
from gpuvirt.model.devices.candidates import Candidate, Target
from gpuvirt.model.reasons import Reason, notoffered


@dataclass(frozen=True, slots=True)
class Holds:
    """The entries, found by what they hold."""

    by_target: Mapping[Target, Entry]
    by_group: Mapping[IommuGroup, tuple[Entry, ...]]
    ours: frozenset[ResourceName]
    """Resources that we have ever offered."""

    def as_held(self, candidate: Candidate) -> Candidate | Reason:
        """Return a device as it may be offered while others are in use, or why it may not be at all.

        A device that is in somebody's hands keeps the name that it went out under: under two names it would be counted,
        and given, twice. One that another plugin gave away is withheld, and so is what shares a group with any.
        """
        own = self.by_target.get(candidate.target)
        if own is None:
            others = self._in_group(candidate)
            if not others:
                return candidate
            return notoffered.group_held(candidate.id, candidate.group, others[0].device, others[0].allocated_to)
        if own.resource == candidate.named.resource:
            return candidate
        if own.resource not in self.ours or own.target.type != candidate.target.type:
            return notoffered.held_under_other_name(
                candidate.id, own.allocated_to, own.resource, candidate.named.resource
            )
        return replace(candidate, named=replace(candidate.named, resource=own.resource))

    def in_the_way(
        self, resource: ResourceName, desired: Iterable[Candidate], unfinished: Container[str]
    ) -> Reason | None:
        """Return why these devices can't be given together to one container, None when they can.

        The kubelet sees to it that an id is free or its pod's own. A holder of one of these devices is therefore the
        same pod or a dead one, and what else it holds is in nobody's way. `unfinished` are the allocations of the
        container that asks.
        """
        candidates = tuple(desired)
        targets = {candidate.target for candidate in candidates}
        for candidate in candidates:
            own = self.by_target.get(candidate.target)
            if own is not None and own.resource != resource:
                return notoffered.held_under_other_name(
                    candidate.id, own.allocated_to, own.resource, candidate.named.resource
                )
        renewed = [self.by_target[target] for target in targets if target in self.by_target]
        for candidate in candidates:
            for entry in self._in_group(candidate):
                ours = any(entry.together_with(own) for own in renewed) or _comes_with(candidate, entry, unfinished)
                if entry.target not in targets and not ours:
                    return notoffered.group_held(candidate.id, candidate.group, entry.device, entry.allocated_to)
        return None

    def siblings(self, candidates: Iterable[Candidate], unfinished: Container[str]) -> Iterator[Candidate]:
        """Yield the devices whose slot's other functions were just given to the container that asks."""
        for candidate in candidates:
            own, others = self.by_target.get(candidate.target), self._in_group(candidate)
            if own is None and any(_comes_with(candidate, entry, unfinished) for entry in others):
                yield candidate

    def not_started(self, candidate: Candidate, unfinished: Container[str]) -> bool:
        """Return whether no container has been started that has a device, or another of its group.

        Containers start when the kubelet has recorded what they have. `unfinished` are the allocations that it has not
        recorded.
        """
        own = self.by_target.get(candidate.target)
        entries = self._in_group(candidate) if own is None else (own, *self._in_group(candidate))
        return all(entry.consumer is None and entry.allocation in unfinished for entry in entries)

    def _in_group(self, candidate: Candidate) -> tuple[Entry, ...]:
        return self.by_group.get(candidate.group, ()) if candidate.group is not None else ()


def _comes_with(candidate: Candidate, entry: Entry, unfinished: Container[str]) -> bool:
    """Return whether the container that asks for a device was given another function of its slot: a GPU, its audio."""
    whole = candidate.target.vgpu is None and entry.target.vgpu is None
    same_slot = slot_of(candidate.target.gpu) == slot_of(entry.target.gpu)
    return whole and same_slot and entry.consumer is None and entry.allocation in unfinished


def find_holds(entries: Iterable[Entry], ours: Iterable[ResourceName]) -> Holds:
    """Return the entries by target and by group; `ours` are the resources that we have ever offered."""
    entries = tuple(entries)
    groups: dict[IommuGroup, tuple[Entry, ...]] = {}
    for entry in entries:
        if entry.group is not None:
            groups[entry.group] = (*groups.get(entry.group, ()), entry)
    return Holds({entry.target: entry for entry in entries}, groups, frozenset(ours))
