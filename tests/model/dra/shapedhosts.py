"""Simulated hosts whose GPUs claims can get, and their slices as the command prints them."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuvirt_sim.archives.export import export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from tests.cli.commandline import ran
from tests.diagnosis.doctor.sickhost import simulated

NATIVE = "  modules: [nvidia, nvidia_uvm, vfio, vfio_iommu_type1, vfio_pci, vfio_pci_core]"
HOSTS = {
    "three native": f"""about: three GPUs for containers
slots:
  - {{at: "0000:17:00.0", board: RTX4090, group: 1, numa: 0}}
  - {{at: "0000:65:00.0", board: RTX4090, group: 2, numa: 0}}
  - {{at: "0000:ca:00.0", board: RTX4090, driver: vfio-pci, group: 3, numa: 1}}
platform:
{NATIVE}
""",
    "two in a group": f"""about: two GPUs for containers in one IOMMU group, and one beside them
slots:
  - {{at: "0000:17:00.0", board: RTX4090, group: 1, numa: 0}}
  - {{at: "0000:65:00.0", board: RTX4090, group: 1, numa: 0}}
  - {{at: "0000:ca:00.0", board: RTX4090, group: 3, numa: 1}}
platform:
{NATIVE}
""",
}
SIMULATED = ("2xA10-sriov", "2xA30", "4xT4", "4xL40S", "vm-V100-8Q", "2xA10", "2xRTX4090-one-group")


def kernel_of(name: str) -> SimKernel:
    """Return a host by its name."""
    return simulated(HOSTS[name]) if name in HOSTS else build_host(load_host(name))


class Value(msgspec.Struct, frozen=True):
    """An attribute that is a text, or a number."""

    string: str = ""


class Capacity(msgspec.Struct, frozen=True):
    """A capacity."""

    value: str


class Device(msgspec.Struct, frozen=True, rename="camel"):
    """A device of a slice."""

    name: str
    attributes: Mapping[str, Value]
    capacity: Mapping[str, Capacity] = {}
    allow_multiple_allocations: bool = False
    consumes_counters: tuple[Mapping[str, object], ...] = ()

    def text(self, attribute: str) -> str:
        """Return the text of an attribute."""
        return self.attributes[attribute].string

    @property
    def gpu(self) -> str:
        """The address of its GPU."""
        return self.text("resource.kubernetes.io/pciBusID")

    def most(self, capacity: str) -> int:
        """Return a capacity."""
        return int(self.capacity[capacity].value.replace("k", "000"))


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """The devices or the counters of a slice."""

    node_name: str
    pool: Mapping[str, object]
    devices: tuple[Device, ...] = ()
    shared_counters: tuple[Mapping[str, object], ...] = ()


class Slice(msgspec.Struct, frozen=True):
    """A ResourceSlice."""

    metadata: Mapping[str, str]
    spec: Spec


class _List(msgspec.Struct, frozen=True):
    items: tuple[Slice, ...]


def printed(name: str, folder: Path) -> str:
    """Return the slices of a host as the command prints them."""
    export(kernel_of(name), folder)
    done = ran(
        "slices",
        "--dry-run",
        "--node-name=node01",
        "-o",
        "json",
        environment={"GPUVIRT_HOST_ROOT": str(folder), "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def slices(text: str) -> tuple[Slice, ...]:
    """Return printed slices."""
    return msgspec.json.decode(text, type=_List).items


def devices(found: tuple[Slice, ...]) -> tuple[Device, ...]:
    """Return the devices of slices, in the order of a scheduler."""
    by_name = sorted(found, key=lambda each: each.metadata["name"])
    return tuple(device for each in by_name for device in each.spec.devices)
