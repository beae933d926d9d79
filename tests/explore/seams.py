"""The seams that are not parameters of the agent: syncs and locks of files, ids, processes, the kubelet's accounts."""

import fcntl
import functools
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Protocol

from gpuvirt.agent.change.gate import gate, gatefiles, gatelock, gatepass
from gpuvirt.agent.change.gate.gaterecord import GateOwner
from gpuvirt.agent.kubelet import accountwatch, hostaccount
from gpuvirt.agent.kubelet.podresources import Devices
from gpuvirt.cli import podaccount
from gpuvirt.clock import Clock
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt_sim import builder, hostspec


class Surroundings(Protocol):
    """The replacements of a schedule for functions of the host on which it runs."""

    @property
    def random(self) -> Random:
        """The source of random ids."""
        ...

    def now(self) -> datetime:
        """Return the time of the schedule."""
        ...

    def sync(self, fd: int, /) -> None:
        """Make a file durable."""
        ...

    def lock(self, fd: int, operation: int, /) -> None:
        """Lock a file."""
        ...

    def monotonic_s(self) -> float:
        """Return how long the host has run."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait for a lock."""
        ...

    def this_process(self) -> GateOwner:
        """Return the calling process."""
        ...

    async def ask_held(self) -> Consumers:
        """Read the devices of pods from the kubelet's API, as the agent does."""
        ...

    async def ask_counted(self) -> Devices:
        """Read the allocatable devices from the kubelet's API, as the agent does."""
        ...

    def ask_now(self) -> Consumers:
        """Read the devices of pods from the kubelet's API, as commands do."""
        ...


class _Now:
    """The surroundings of the running schedule."""

    found: Surroundings | None = None


def _here() -> Surroundings:
    assert _Now.found is not None, "no schedule runs"
    return _Now.found


class _PodResources:
    """The client of the kubelet's API, without its connection."""

    def __init__(self, socket: Path, clock: Clock) -> None:
        del socket, clock

    async def consumers(self) -> Consumers:
        return await _here().ask_held()

    async def allocatable(self) -> Devices:
        return await _here().ask_counted()

    async def close(self) -> None:
        return


class _Clock:
    """The clock of commands."""

    def now(self) -> datetime:
        return _here().now()


def _ask_consumers(socket: Path) -> Consumers:
    del socket
    return _here().ask_now()


def _new_id() -> uuid.UUID:
    return uuid.UUID(int=_here().random.getrandbits(128), version=4)


def _sync(fd: int) -> None:
    _here().sync(fd)


def _lock(fd: int, operation: int) -> None:
    _here().lock(fd, operation)


def _monotonic() -> float:
    return _here().monotonic_s()


def _sleep(seconds: float) -> None:
    _here().sleep(seconds)


def _this_process() -> GateOwner:
    return _here().this_process()


_PLACES: Sequence[tuple[object, str, object]] = (
    (os, "fsync", _sync),
    (fcntl, "flock", _lock),
    (uuid, "uuid4", _new_id),
    (gate, "monotonic", _monotonic),
    (gatelock, "monotonic", _monotonic),
    (gatefiles, "monotonic", _monotonic),
    (gatelock, "sleep", _sleep),
    (gate, "this_process", _this_process),
    (gatepass, "this_process", _this_process),
    (gatefiles, "this_process", _this_process),
    (accountwatch, "PodResources", _PodResources),
    (hostaccount, "ask_consumers", _ask_consumers),
    (podaccount, "RealClock", _Clock),
    (podaccount, "monotonic", _monotonic),
    (builder, "shared_cards", functools.cache(hostspec.shared_cards)),
)


@contextmanager
def explored(surroundings: Surroundings) -> Iterator[None]:
    """Use a schedule's surroundings instead of the host's for as long as the context lasts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _PLACES]
    _Now.found = surroundings
    for owner, name, instead in _PLACES:
        setattr(owner, name, instead)
    try:
        yield
    finally:
        for owner, name, was in before:
            setattr(owner, name, was)
        _Now.found = None
