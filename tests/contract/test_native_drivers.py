"""A real native driver that is not NVIDIA's: a process that opens its node during a change keeps its device.

The driver is `gpuvirt_native` of lab/kernel. It is unbound although its node is open, and its users then read ENODEV.
Nothing but a search of the processes tells that the node is open.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lab.kernel.modules import NATIVE
from typing_extensions import override

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.steps import RollBack, Step, Unbind
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostPath
from tests.agent.change.changes import NOBODY, change_drivers, change_host_in, driver_state
from tests.contract.guesthost import GuestHost, Guests
from tests.contract.hosts import exists, write
from tests.contract.notools import NoTools

pytestmark = [pytest.mark.ring("kernel"), pytest.mark.xdist_group("guest")]

ALONE = PciAddress("0000:04:00.0")
GPU, AUDIO = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1")
IDS = ("vendor", "device")
DRIVER = f"/sys/bus/pci/drivers/{NATIVE}"


@dataclass
class Job:
    """A process of the guest that has a node open, and reads it all the time."""

    guest: GuestHost
    node: str
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.number = self.guest.guest.channel.number("node_user", self.node)

    @property
    def pid(self) -> int:
        return self.guest.guest.channel.number("node_user_pid", self.number)

    def failure(self, within_s: float | None = None) -> int:
        """Return the errno of its first failed read, 0 if none fails for a while."""
        within_s = self.guest.patience_s if within_s is None else within_s
        return self.guest.guest.channel.number("node_user_failure", self.number, str(within_s))


class GuestTools(NoTools):
    """Loads modules in the guest, and calls `then` before."""

    def __init__(self, guest: GuestHost, then: Callable[[], None]) -> None:
        self._guest, self._then = guest, then

    @override
    def modprobe(self, module: str) -> None:
        self._then()
        self._guest.guest.run("modprobe", module)


@pytest.fixture
def guest(guests: Guests) -> Iterator[GuestHost]:
    """A guest with a card on the native driver, and another one whose audio function is on it."""
    with guests.fresh() as host:
        host.guest.run("insmod", f"/mnt/share/{NATIVE}.ko")
        try:
            assert write(host, f"/sys/bus/pci/devices/{AUDIO}/driver/unbind", AUDIO) == 0
            for address in (ALONE, AUDIO):
                host_ids = (host.kernel.read(HostPath(f"/sys/bus/pci/devices/{address}/{name}")) for name in IDS)
                ids = " ".join(text.decode().strip().removeprefix("0x") for text in host_ids)
                assert write(host, f"{DRIVER}/new_id", ids) == 0
                assert exists(host, f"{DRIVER}/{address}")
            yield host
        finally:
            host.guest.channel.texts("restore")
            host.guest.run("rmmod", NATIVE)


def node_of(guest: GuestHost, address: PciAddress) -> str:
    (name,) = guest.kernel.listdir(HostPath(f"/sys/bus/pci/devices/{address}/{NATIVE}"))
    return f"/dev/{name}"


def lost(guest: GuestHost) -> int:
    return int(guest.kernel.read(HostPath(f"/sys/module/{NATIVE}/parameters/lost")))


class Change:
    """A change to vfio-pci, during which a process opens a node."""

    def __init__(self, guest: GuestHost, folder: Path, opened: PciAddress) -> None:
        self.guest, self.node = guest, node_of(guest, opened)
        self.job: Job | None = None
        self.change_host = change_host_in(folder, guest.kernel, GuestTools(guest, self._during_modprobe))
        self.opens_during_modprobe = False

    def open(self) -> None:
        assert self.job is None
        self.job = Job(self.guest, self.node)

    def _during_modprobe(self) -> None:
        if self.opens_during_modprobe:
            self.open()

    def take(self, gpu: PciAddress, opens_before: Callable[[Step | RollBack], bool]) -> tuple[Reason, ...]:
        """Bind a GPU to vfio-pci; a process opens the node right before the first step that is selected."""

        def report(step: Step | RollBack) -> None:
            if self.job is None and opens_before(step):
                self.open()

        unit = driver_state(self.change_host, NOBODY).inventory.gpus[gpu].unit
        return tuple(change_drivers(self.change_host, unit, {gpu: DesiredDriver.PASSTHROUGH}, NOBODY, report))

    def assert_refused(self, reasons: tuple[Reason, ...]) -> None:
        """Assert that the change was refused for the process, which has noticed nothing."""
        assert self.job is not None
        assert {reason.code for reason in reasons} == {ReasonCode.IN_USE}
        assert any(f"pid {self.job.pid}" in reason.text for reason in reasons)
        assert self.job.failure() == 0
        assert lost(self.guest) == 0


@pytest.fixture
def without_vfio_pci(guest: GuestHost) -> Iterator[None]:
    guest.guest.run("rmmod", "vfio-pci")
    yield
    guest.guest.run("modprobe", "vfio-pci")


def test_the_driver_is_unbound_under_its_users_who_lose_their_device(guest: GuestHost) -> None:
    """The control: it shows that the tests below would notice a lost device."""
    job = Job(guest, node_of(guest, ALONE))
    before = lost(guest)
    assert job.failure() == 0

    assert write(guest, f"{DRIVER}/unbind", ALONE) == 0

    assert job.failure(10.0) == errno.ENODEV
    assert lost(guest) == before + 1


def test_a_card_without_users_moves_to_vfio(guest: GuestHost, tmp_path: Path) -> None:
    change = Change(guest, tmp_path, ALONE)

    assert change.take(ALONE, lambda _: False) == ()

    assert exists(guest, f"/sys/bus/pci/drivers/vfio-pci/{ALONE}")
    assert lost(guest) == 0


def test_a_node_that_is_opened_before_the_change_refuses_it(guest: GuestHost, tmp_path: Path) -> None:
    change = Change(guest, tmp_path, ALONE)
    change.open()

    change.assert_refused(change.take(ALONE, lambda _: False))


@pytest.mark.usefixtures("without_vfio_pci")
def test_a_node_that_is_opened_during_modprobe_keeps_its_driver(guest: GuestHost, tmp_path: Path) -> None:
    change = Change(guest, tmp_path, ALONE)
    change.opens_during_modprobe = True

    change.assert_refused(change.take(ALONE, lambda _: False))
    assert exists(guest, f"{DRIVER}/{ALONE}")


def test_a_node_that_is_opened_after_the_override_keeps_its_driver(guest: GuestHost, tmp_path: Path) -> None:
    change = Change(guest, tmp_path, ALONE)

    change.assert_refused(change.take(ALONE, lambda step: isinstance(step, Unbind)))
    assert exists(guest, f"{DRIVER}/{ALONE}")
    assert guest.kernel.read(HostPath(f"/sys/bus/pci/devices/{ALONE}/driver_override")) == b"(null)\n"


def test_a_node_that_is_opened_between_two_functions_of_a_unit_keeps_its_driver(
    guest: GuestHost, tmp_path: Path
) -> None:
    """The GPU is unbound by then: it gets its driver again."""
    change = Change(guest, tmp_path, AUDIO)

    change.assert_refused(change.take(GPU, lambda step: isinstance(step, Unbind) and step.address == AUDIO))
    assert exists(guest, f"{DRIVER}/{AUDIO}")
    assert exists(guest, f"/sys/bus/pci/drivers/nvidia/{GPU}")
