"""Changing a host by hand: each job in a lane, which is left behind where the kernel puts it to sleep."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from gpuvirt.model import refusals
from gpuvirt.model.change.desired import DesiredUnit
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.inventory import Inventory
from gpuvirt.model.isolation import UnitId
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.changes import by_hand
from gpuvirt.node.change.gate import UnitBlockedError, UnitBusyError, UnitUnsettledError
from gpuvirt.node.change.inputs import Inputs
from gpuvirt.node.change.site import Site, Tell
from gpuvirt.node.change.unitchange import Outcome, apply
from gpuvirt.node.change.vgpusteps import Run
from gpuvirt.node.lane import LaneBlockedError, ThreadLane

T = TypeVar("T")

CHANGE_TIMEOUT_S = 180.0
"""sriov-manage takes some seconds a GPU, and tries again where somebody looks at the GPU meanwhile; NVIDIA's driver may
take half a minute to let a GPU go."""


def changed_in_lane(
    site: Site,
    unit: UnitId,
    desired: DesiredUnit,
    inputs: Inputs,
    first: Inventory | None = None,
    *,
    quiet: bool,
) -> tuple[tuple[str, ...], Outcome]:
    """Bring a unit to what is desired; return the steps that were taken, and what that came to."""
    tell, taken = teller(quiet=quiet)

    def job() -> Outcome:
        return apply(site, unit, desired, inputs, Run(tell, by_hand(unit, inputs.newest)), first)

    found = in_lane(unit, job, taken)
    return tuple(taken), Outcome.everywhere(found, desired) if isinstance(found, Reason) else found


def teller(*, quiet: bool) -> tuple[Tell, list[str]]:
    """Return what is called with each step before it is taken, and where it keeps the steps; it prints them, too."""
    taken: list[str] = []

    def tell(step: Step | RollBack) -> None:
        taken.append(step.text)
        if not quiet:
            print(step.text, flush=True)

    return tell, taken


def in_lane(subject: str, job: Callable[[], T], taken: Sequence[str]) -> T | Reason:
    """Return what a job comes to; `taken` are the steps that it has begun, the last of which may sleep."""
    try:
        return asyncio.run(ThreadLane(subject).run(job, name="change", timeout_s=CHANGE_TIMEOUT_S))
    except LaneBlockedError:
        return refusals.blocked(subject, taken[-1] if taken else "the lease")
    except UnitBlockedError as error:
        return refusals.blocked(subject, error.step)
    except UnitUnsettledError as error:
        return refusals.unsettled(subject, str(error))
    except UnitBusyError as error:
        return refusals.busy(subject, str(error))
