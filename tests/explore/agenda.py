"""The possible next events, in the default order, and how a schedule may depart from it.

By default the running strand continues; then the other ready strands; then the kubelet, the clock, and the actors, one
action after another. A schedule departs from it in one of four ways: an option is held, so that all others go first
until it is released; a held option is released; an actor acts now; or time passes now.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.explore.reduction import ALL, Touches

Key = object
"""The key of a held option: a strand, or an event of the kubelet."""


@dataclass(frozen=True, slots=True)
class Option:
    """One possible next event."""

    name: str
    act: Callable[[], None]
    key: Key = None
    """None for an option that can't be held."""
    touches: Touches = frozenset({ALL})
    """The state that an actor's action touches."""
    goes_on: bool = False
    """Whether it continues a strand; no strand runs during any other option."""


@dataclass(frozen=True, slots=True)
class PossibleEvents:
    """The possible events other than strands that continue."""

    soon: Sequence[Option] = ()
    """Events of the kubelet and the cluster."""
    echo: Option | None = None
    """Time passes, in which begun operations may end."""
    actions: Sequence[Option] = ()
    """The next action of each actor."""
    patience: Option | None = None
    """Time passes, in which an actor waits until its action is possible."""


class Agenda:
    """Orders the possible events."""

    def __init__(self) -> None:
        self._held: list[Key] = []

    def options(self, strands: Sequence[Option], others: PossibleEvents, *, exploring: bool) -> Sequence[Option]:
        """Return the possible events, the default first; the others are departures from it."""
        free = [strand for strand in (*strands, *others.soon) if strand.key not in self._held]
        last = [strand for strand in (*strands, *others.soon) if strand.key in self._held]
        time = [others.echo] if others.echo is not None else []
        patience = [others.patience] if others.patience is not None and not others.actions else []
        in_order = [*free, *time, *others.actions, *patience, *last]
        if not in_order or not exploring:
            return in_order[:1]
        default = in_order[0]
        found = [default]
        if default.key is not None and default.key not in self._held and len(in_order) > 1:
            found.append(Option(f"hold {default.name}", lambda: self._held.append(default.key)))
        found += [option for option in free[1:] if option.goes_on and option.key is default.key]
        found += [action for action in others.actions if action is not default]
        found += [option for option in last if option is not default]
        found += [option for option in time if option is not default]
        return found

    def release(self, option: Option) -> None:
        """Release an option that happens now."""
        if option.key in self._held:
            self._held.remove(option.key)

    def release_all(self) -> None:
        """Release all options."""
        self._held.clear()
