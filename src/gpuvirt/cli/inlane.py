"""Changing a host by hand: each job in a lane, which is left behind where the kernel puts it to sleep."""

import asyncio
from collections.abc import Callable, Sequence

from gpuvirt.model import refusals
from gpuvirt.model.reasons import Reason
from gpuvirt.node.change.gate import UnitBlockedError, UnitBusyError, UnitUnsettledError
from gpuvirt.node.lane import LaneBlockedError, ThreadLane


def in_lane(
    subject: str, job: Callable[[], tuple[Reason, ...]], taken: Sequence[str], *, timeout_s: float
) -> tuple[Reason, ...]:
    """Return what a job comes to; `taken` are the steps that it has begun, the last of which may sleep."""
    try:
        return asyncio.run(ThreadLane(subject).run(job, name="change", timeout_s=timeout_s))
    except LaneBlockedError:
        return (refusals.blocked(subject, taken[-1] if taken else "the lease"),)
    except UnitBlockedError as error:
        return (refusals.blocked(subject, error.step),)
    except UnitUnsettledError as error:
        return (refusals.unsettled(subject, str(error)),)
    except UnitBusyError as error:
        return (refusals.busy(subject, str(error)),)
