"""A simulated vCenter, and connections to it."""

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.vsphere.simulator import USER, Serving, VSphere, vsphere

from gpuvirt.clock import RealClock
from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind
from gpuvirt.model.workers.hypervisor import VmKey, VmsUnknown, WorkerVm
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor, start_order
from tests.web.certificates import Authority

CLOCK = RealClock()
PASSWORD = "pass-Wörd-4711&<>"  # noqa: S105  of a simulator
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Center:
    """A running vCenter, with what a Secret has of it."""

    vsphere: VSphere
    credentials: HypervisorCredentials


@contextmanager
def center(
    folder: Path, authority: Authority, *options: str, port: int = 0, address: str = "127.0.0.1"
) -> Iterator[Center]:
    """Run a vCenter that keeps its state in a folder."""
    pair = authority.server("vcenter", alternatives=f"IP:{address}")
    serving = Serving(pair.certificate, pair.key, folder / "state.json", PASSWORD)
    with vsphere(serving, f"-address={address}", *options, port=port) as running:
        ca = authority.certificate.read_text()
        yield Center(running, HypervisorCredentials(f"{address}:{running.port}", ca, USER, PASSWORD))


@asynccontextmanager
async def connected(
    credentials: HypervisorCredentials,
    *,
    request_s: float = PATIENCE_S,
    until_s: Callable[[], float] = lambda: math.inf,
    kind: HypervisorKind = HypervisorKind.VSPHERE,
) -> AsyncIterator[ChildHypervisor]:
    """Open a connection; nothing needs to answer."""
    start = start_order(kind, credentials)
    hypervisor = ChildHypervisor(start, CLOCK, until_s, request_s=request_s)
    try:
        yield hypervisor
    finally:
        await hypervisor.close()


async def vms(hypervisor: ChildHypervisor) -> dict[str, WorkerVm]:
    """Return the VMs by name."""
    reading = await hypervisor.read()
    assert not isinstance(reading, VmsUnknown), reading
    assert all(vm.key == key for key, vm in reading.items())
    return {vm.name: vm for vm in reading.values()}


async def until(hypervisor: ChildHypervisor, met: Callable[[dict[str, WorkerVm]], bool]) -> dict[str, WorkerVm]:
    """Read the VMs until a condition is met."""
    while not met(found := await vms(hypervisor)):
        await CLOCK.sleep(0.02)
    return found


def key(number: int) -> VmKey:
    """Return the key of a worker."""
    return VmKey(f"5017bbbb-0000-0000-0000-{number:012}")


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def shows(text: str) -> bool:
    return PASSWORD in text or ascii(PASSWORD)[1:-1] in text


def shown_by_kernel(pid: int) -> bytes:
    return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
