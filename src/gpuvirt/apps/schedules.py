"""Runs VgpuSchedules in the leading controller. No other module of the process loads what only schedules need."""

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.operator.schedules.keeper import ScheduleKeeper
from gpuvirt.cluster.operator.schedules.secretconnection import Opener
from gpuvirt.hypervisors.connecting import open_hypervisor
from gpuvirt.model.schedules.connection import MayCallUntil


def schedule_keeper(leading: Client, namespace: str, clock: Clock, *, may_call_until_s: MayCallUntil) -> ScheduleKeeper:
    """Return the keeper of one term as the leader, which has just begun.

    Writes of `leading` are sent with the lease alone; `may_call_until_s` is when the lease ends without a renewal.
    """
    opener = Opener(leading, namespace, clock, open_hypervisor, may_call_until_s)
    return ScheduleKeeper(leading, namespace, clock, opener.connect, lambda: clock.monotonic_s() < may_call_until_s())
