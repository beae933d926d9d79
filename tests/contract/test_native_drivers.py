"""A real native driver that is not NVIDIA's: `gpuvirt_native` of lab/kernel.

It is unbound although its node is open, and its users then read ENODEV.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from lab.kernel.modules import NATIVE

from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.paths import HostPath
from tests.contract.guesthost import GuestHost, Guests
from tests.contract.hosts import exists, write
from tests.contract.test_moves import Mover

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


@pytest.fixture
def guest(guests: Guests) -> Iterator[GuestHost]:
    """A guest with a card on the native driver, and another one whose audio function is on it."""
    host = guests.fresh()
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


def test_the_driver_is_unbound_under_its_users_who_lose_their_device(guest: GuestHost) -> None:
    job = Job(guest, node_of(guest, ALONE))
    assert job.failure() == 0

    assert write(guest, f"{DRIVER}/unbind", ALONE) == 0

    assert job.failure(10.0) == errno.ENODEV
    assert lost(guest) == 1


def test_a_card_without_users_moves_to_vfio(guest: GuestHost, tmp_path: Path) -> None:
    assert Mover(guest.kernel, tmp_path).move(DesiredDriver.PASSTHROUGH, ALONE) == []

    assert exists(guest, f"/sys/bus/pci/drivers/vfio-pci/{ALONE}")
    assert lost(guest) == 0
