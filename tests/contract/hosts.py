"""Hosts of the contract tests: the simulated kernel in memory and mounted, and a real kernel in a guest (`guesthost`).

Where their answers differ, the simulator is wrong.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from gpuvirt.errors import DeviceBusyError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access.kernel import Kernel, RealKernel
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel

HOST_FILE = Path(__file__).parent / "host.yaml"

LONG_S = 60.0
"""How long something that must come is waited for; it comes in a moment, but for others' load on the computer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a read or a write."""

    errno: int = 0
    data: bytes = b""


class Job(Protocol):
    """A read or a write that may block."""

    def answer(self, within_s: float) -> Answer | None:
        """Return the result, None while it blocks."""
        ...


class Vm(Protocol):
    """A VM, or another process that has a group open."""

    def asked_back(self, within_s: float = 0.0) -> bool:
        """Return whether VFIO has requested a device back (VFIO's request event), now or within the time."""
        ...

    def end(self) -> None:
        """Close all files."""
        ...


class Host(Protocol):
    """One host."""

    @property
    def kernel(self) -> Kernel:
        """The kernel of the host, for calls that do not block."""
        ...

    @property
    def series(self) -> tuple[int, int]:
        """The kernel's series, for behaviour that differs by version."""
        ...

    @property
    def patience_s(self) -> float:
        """How long a call must block to count as blocked."""
        ...

    def start_vm(self, group: IommuGroup, *, devices: bool = True) -> Vm:
        """Open a group, and by default all its devices; raise OSError as the kernel does."""
        ...

    def start_write(self, path: str, text: str) -> Job:
        """Start a write in a thread or process of its own."""
        ...

    def start_read(self, path: str) -> Job:
        """Start a read in a thread or process of its own."""
        ...


def group_of(host: Host, device: str) -> IommuGroup:
    """Return the IOMMU group of a PCI function or an mdev."""
    bus = "pci" if device[4:5] == ":" else "mdev"
    link = host.kernel.readlink(HostPath(f"/sys/bus/{bus}/devices/{device}/iommu_group"))
    return IommuGroup(int(link.rpartition("/")[2]))


def until_free(host: Host, group: IommuGroup) -> None:
    """Wait until a group can be opened: the mounted kernel learns of a closed file a moment later."""
    deadline = time.monotonic() + LONG_S  # noqa: TID251  another process's time
    while True:
        try:
            with host.kernel.lease(group):
                return
        except DeviceBusyError:
            assert time.monotonic() < deadline, f"{group} stays busy"  # noqa: TID251


def write(host: Host, path: str, text: str) -> int:
    """Write, and return the errno, 0 on success."""
    answer = host.start_write(path, text).answer(LONG_S)
    assert answer is not None, f"writing {text!r} to {path} blocks"
    return answer.errno


def exists(host: Host, path: str) -> bool:
    """Return whether a folder has an entry of that name."""
    folder, _, name = path.rpartition("/")
    return name in host.kernel.listdir(HostPath(folder))


def bind(host: Host, address: PciAddress, driver: str) -> None:
    """Bind a function to a driver, as an admin does by hand."""
    device = f"/sys/bus/pci/devices/{address}"
    assert write(host, f"{device}/driver_override", driver) == 0
    if exists(host, f"{device}/driver"):
        assert write(host, f"{device}/driver/unbind", address) == 0
    assert write(host, "/sys/bus/pci/drivers_probe", address) == 0
    assert host.kernel.readlink(HostPath(f"{device}/driver")).rpartition("/")[2] == driver


class ThreadJob:
    """A call in a thread."""

    def __init__(self, call: Callable[[], bytes]) -> None:
        self._call = call
        self._answer: Answer | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        try:
            self._answer = Answer(data=self._call())
        except OSError as error:
            self._answer = Answer(error.errno or -1)
        self._ended.set()

    def answer(self, within_s: float) -> Answer | None:
        self._ended.wait(within_s)
        return self._answer


class ThreadCallers:
    """Callers that are threads of this process."""

    patience_s = 0.3
    series = (6, 1)

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def start_write(self, path: str, text: str) -> Job:
        def call() -> bytes:
            self.kernel.write(HostPath(path), text.encode())
            return b""

        return ThreadJob(call)

    def start_read(self, path: str) -> Job:
        return ThreadJob(lambda: self.kernel.read(HostPath(path)))


class MemoryVm:
    """A process of the simulated kernel that has a group open."""

    def __init__(self, kernel: SimKernel, process: Process, asked_before: int) -> None:
        self._kernel = kernel
        self._process = process
        self._asked_before = asked_before

    def asked_back(self, within_s: float = 0.0) -> bool:
        with self._kernel.blocking.condition:
            requests = self._kernel.vfio.requests
            return self._kernel.blocking.condition.wait_for(lambda: len(requests) > self._asked_before, within_s)

    def end(self) -> None:
        self._kernel.end_vm(self._process)


class CdevHost(Host, Protocol):
    """A host whose kernel has a node for each VFIO device."""

    def open_devices(self, *devices: str, bind: bool = True) -> Vm:
        """Open devices by their own nodes, and by default bind them to an iommufd; raise as the kernel does."""
        ...


def cdev_of(host: Host, device: str) -> str:
    """Return the name of a PCI function's or an mdev's own node."""
    bus = "pci" if device[4:5] == ":" else "mdev"
    (name,) = host.kernel.listdir(HostPath(f"/sys/bus/{bus}/devices/{device}/vfio-dev"))
    return name


class MemoryHost(ThreadCallers):
    """The simulated kernel, called directly."""

    def __init__(self, *, iommufd: bool = False, group_nodes: bool = True) -> None:
        spec = msgspec.structs.replace(load_host(str(HOST_FILE)), iommufd=iommufd, group_nodes=group_nodes)
        self._sim = build_host(spec, wait=True)
        super().__init__(self._sim)

    def load_driver(self, driver: str) -> None:
        """Load another driver into the kernel."""
        self._sim.pci.add_driver(driver)

    def open_devices(self, *devices: str, bind: bool = True) -> Vm:
        asked = len(self._sim.vfio.requests)
        names = [cdev_of(self, device) for device in devices]
        return MemoryVm(self._sim, self._sim.open_devices(names, bind=bind), asked)

    def start_vm(self, group: IommuGroup, *, devices: bool = True) -> Vm:
        asked = len(self._sim.vfio.requests)
        return MemoryVm(self._sim, self._sim.start_vm(group, devices=devices), asked)


class MountedHost:
    """A process of the mounted kernel that has a group open."""

    def __init__(self, host: "MountHost", number: int) -> None:
        self._host = host
        self._number = number

    def asked_back(self, within_s: float = 0.0) -> bool:
        return self._host.send("asked_back", str(self._number), str(within_s)) == 1

    def end(self) -> None:
        self._host.send("end", str(self._number))


class MountHost(ThreadCallers):
    """The simulated kernel in another process, mounted."""

    def __init__(self, folder: Path, server: "subprocess.Popen[str]") -> None:
        super().__init__(RealKernel(HostRoots.under(folder)))
        self._server = server

    def send(self, *words: str) -> int:
        """Send a command to the host; return the server's reply."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(*words, file=self._server.stdin, flush=True)
        answer: dict[str, int] = json.loads(self._server.stdout.readline())
        if "errno" in answer:
            raise OSError(answer["errno"], " ".join(words))
        return answer["value"]

    def start_vm(self, group: IommuGroup, *, devices: bool = True) -> Vm:
        return MountedHost(self, self.send("start", str(group), "devices" if devices else "group"))


@contextmanager
def mounted(folder: Path) -> Iterator[MountHost]:
    """Mount the simulated host for as long as the context lasts."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "mountserver.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            assert server.stdout.readline() == "ready\n", server.stderr.read()
            yield MountHost(folder, server)
        finally:
            server.terminate()
