"""A real kernel in a guest as a host of the contract tests; the tests run outside, and only calls go into it.

One guest of each flavour serves a whole run. Between tests it is paused, and its devices are reset to their initial
state. If a blocked writer makes that impossible, another guest is booted; so it is after a boot that was not ready in
time.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self
from zlib import crc32

import pytest
from _pytest.python import CallSpec
from lab.kernel.channel import Channel
from lab.kernel.errors import NotBootedError
from lab.kernel.guest import Guest, booted
from lab.kernel.kit import Flavour, prepare

from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.kernel import Kernel
from tests.contract.hosts import LONG_S, Answer, Job, Vm
from tests.thoroughness import is_quick

log = logging.getLogger(__name__)

NAMES = ("guest", "guest612")
GUESTS = [pytest.param(name, marks=[pytest.mark.ring("kernel"), pytest.mark.xdist_group("guest")]) for name in NAMES]
"""The real kernels by which the fixture `host` goes."""


def elsewhere(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests that a quick run makes on the other kernel; the name of a test says on which one it is made."""
    variants = defaultdict[str, dict[str, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items if is_quick() else ():
        if isinstance(item, pytest.Function) and (host := _kernel_of(item)) is not None:
            variants[f"{item.path.name}::{item.originalname}"][host].append(item)
    for name, found in variants.items():
        if len(found) == len(NAMES):
            yield from found[NAMES[crc32(name.encode()) % len(NAMES)]]


def _kernel_of(test: pytest.Function) -> str | None:
    """Return the real kernel that a test runs on, None for others."""
    chosen: CallSpec | None = getattr(test, "callspec", None)
    host = chosen.params.get("host") if chosen is not None else None
    return host if host in NAMES else None


class GuestJob:
    """A call in a process of the guest."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    @property
    def pid(self) -> int:
        """The process, as the guest numbers it."""
        return self._channel.number("caller_pid", self._number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self._channel.call("caller_kill", self._number)

    def answer(self, within_s: float) -> Answer | None:
        try:
            reported = self._channel.call("caller_answer", self._number, str(within_s), within_s=within_s + LONG_S)
        except OSError as error:
            return Answer(error.errno or -1)
        return None if reported is None else Answer(data=str(reported).encode("latin-1"))


class GuestVm:
    """A process in the guest that has a group open."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel = channel
        self._number = number

    def asked_back(self, within_s: float = 0.0) -> bool:
        return self._channel.number("user_asked_back", self._number, str(within_s), within_s=within_s + LONG_S) == 1

    def end(self) -> None:
        self._channel.call("user_end", self._number)


class GuestHost:
    """The kernel in a guest."""

    patience_s = 1.0

    def __init__(self, guest: Guest, series: tuple[int, int]) -> None:
        self.guest = guest
        self.series = series
        self.kernel: Kernel = guest.kernel

    def start_vm(self, group: IommuGroup, *, devices: bool = True) -> Vm:
        number = self.guest.channel.number("user_of_group", group, "devices" if devices else "group")
        return GuestVm(self.guest.channel, number)

    def open_devices(self, *devices: str, bind: bool = True) -> Vm:
        number = self.guest.channel.number("user_of_devices", "bound" if bind else "open", *devices)
        return GuestVm(self.guest.channel, number)

    def start_write(self, path: str, text: str) -> Job:
        return self.start_writer(path, text)

    def start_read(self, path: str) -> Job:
        return GuestJob(self.guest.channel, self.guest.channel.number("caller_read", path))

    def start_writer(self, path: str, text: str) -> GuestJob:
        """Start a write in a process whose id is known."""
        return GuestJob(self.guest.channel, self.guest.channel.number("caller_write", path, text))


class Guests:
    """One guest of each flavour for a run, replaced if it becomes unusable."""

    def __init__(self) -> None:
        self._lives: dict[Flavour, ExitStack] = {}
        self._guests: dict[Flavour, Guest] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for life in self._lives.values():
            life.close()

    @contextmanager
    def fresh(self, flavour: Flavour = Flavour.GROUPS) -> Iterator[GuestHost]:
        """Yield a guest whose devices are in their initial state. It runs for as long as the context lasts."""
        guest = self._guests.get(flavour)
        if guest is not None:
            guest.resume()
        if guest is None or not guest.restore():
            self._guests.pop(flavour, None)
            guest = self._guests[flavour] = self._boot(flavour)
        try:
            yield GuestHost(guest, (6, 1) if flavour is Flavour.GROUPS else (6, 12))
        finally:
            guest.pause()

    def _boot(self, flavour: Flavour) -> Guest:
        """Boot a guest in place of the last one; a second one where the first is not ready in time."""
        life = self._lives.setdefault(flavour, ExitStack())
        life.close()
        try:
            return life.enter_context(booted(prepare(flavour)))
        except NotBootedError as error:
            log.warning("another guest is booted: %s", error)
            return life.enter_context(booted(prepare(flavour)))
