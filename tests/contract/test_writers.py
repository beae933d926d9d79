"""A process that is killed while the kernel blocks its write exits, and the blocked writer keeps the unit's lock."""

import time
from collections.abc import Callable, Iterator

import pytest

from gpuvirt.facts.ids import PciAddress
from gpuvirt.paths import HostPath
from tests.contract.guesthost import GuestHost, Guests
from tests.contract.hosts import LONG_S, bind, exists, group_of

pytestmark = [pytest.mark.ring("kernel"), pytest.mark.xdist_group("guest")]

GPU, AUDIO, OTHER = PciAddress("0000:01:00.0"), PciAddress("0000:01:00.1"), PciAddress("0000:03:00.0")
UNBIND = "/sys/bus/pci/drivers/vfio-pci/unbind"
PROC = HostPath("/proc")


class Changers:
    """Processes of the guest that change devices as an agent does."""

    def __init__(self, host: GuestHost) -> None:
        self._host = host
        self._run("mkdir -p /tmp/agent /tmp/units")

    def _run(self, script: str) -> str:
        return self._host.guest.run("sh", "-c", script)

    def start(self, name: str, unit: PciAddress, path: str) -> int:
        """Start to unbind a device; return the process."""
        command = f"python3 -m lab.kernel.inside.changer /tmp/agent /tmp/units {unit} {path} {unit}"
        return int(self._run(f"cd /mnt/share; {command} > /tmp/{name} 2>&1 < /dev/null & echo $!"))

    def reported(self, name: str) -> list[str]:
        """Return its output so far."""
        return self._run(f"cat /tmp/{name}").split("\n")[:-1]

    def kill(self, pid: int) -> None:
        """Send it SIGKILL."""
        self._run(f"kill -9 {pid}")

    def has_ended(self, pid: int) -> bool:
        """Return whether it has exited, or is a zombie without open files."""
        if str(pid) not in self._host.kernel.listdir(PROC):
            return True
        return self._host.kernel.read(HostPath(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[0] == b"Z"


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S  # noqa: TID251  another kernel's time
    while not met():
        assert time.monotonic() < deadline  # noqa: TID251
        time.sleep(0.1)  # noqa: TID251


@pytest.fixture
def host(guests: Guests) -> Iterator[GuestHost]:
    with guests.fresh() as host:
        yield host


def test_an_agent_killed_while_the_kernel_blocks_its_write_is_replaced(host: GuestHost) -> None:
    bind(host, GPU, "vfio-pci")
    bind(host, AUDIO, "vfio-pci")
    bind(host, OTHER, "vfio-pci")
    changers, vm = Changers(host), host.start_vm(group_of(host, GPU))
    first = changers.start("first", GPU, UNBIND)
    assert vm.asked_back(LONG_S)
    changers.kill(first)
    until(lambda: changers.has_ended(first))
    assert changers.reported("first") == ["agent", "unit"]
    changers.start("successor", GPU, UNBIND)
    until(lambda: len(changers.reported("successor")) == 2)
    assert changers.reported("successor") == ["agent", f"blocked: write {UNBIND}"]
    changers.start("beside", OTHER, UNBIND)
    until(lambda: changers.reported("beside") == ["agent", "unit", "written"])
    assert not exists(host, f"/sys/bus/pci/devices/{OTHER}/driver")
    vm.end()

    def is_free() -> bool:
        changers.start("later", GPU, UNBIND)
        until(lambda: len(changers.reported("later")) > 1)
        return "unit" in changers.reported("later")

    until(is_free)
    until(lambda: changers.reported("later")[2:] == ["errno 19"])
