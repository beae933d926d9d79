"""Doctor's findings on a host equal its findings on the imported host."""

import errno
import io
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpuvirt.agent.store import hostfiles
from gpuvirt.diagnosis.findings import Finding
from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.setup import Setup, parts
from gpuvirt.facts.snapshot import Facts
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.archives.hostcopy import copy_host
from gpuvirt.hardware.archives.redaction import Discreet
from gpuvirt.hardware.host.platform import read_setup
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.state import DriverJournal
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.archived import ArchivedKernel
from gpuvirt_sim.archives.importing import Imported, import_archive, import_host
from gpuvirt_sim.archives.unpacking import unpack
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.platform import Boot, Cpu, PlatformSpec, ScreenSpec
from gpuvirt_sim.files.tree import File, Link, constant
from gpuvirt_sim.hostspec import host_names
from gpuvirt_sim.kernel import SimKernel
from tests.cli.support.archives import opened, packed
from tests.diagnosis.doctor.badhosts import BAD
from tests.diagnosis.doctor.sickhost import examine, findings, host
from tests.sim.simulated import Simulated
from tests.thoroughness import examples


def imported(kernel: Kernel) -> Imported:
    return import_host(ArchivedKernel(opened(kernel)), "a test")


OF_PROCESSES = {FindingCode.CPUS_ON_OTHER_NODE, ReasonCode.IN_USE_ELSEWHERE}
"""No archive holds who has what open."""


def doctor_findings(kernel: SimKernel) -> list[Finding]:
    """Return doctor's findings, except those about processes."""
    return [finding for finding in findings(examine(kernel)) if finding.code not in OF_PROCESSES]


def setup_of(kernel: Kernel) -> Setup:
    gpus = [gpu.function for gpu in build_inventory(scan(kernel)).gpus.values()]
    return read_setup(Discreet(kernel), Facts(), gpus)


def assert_same(kernel: SimKernel) -> Imported:
    then = ArchivedKernel(opened(kernel))
    assert parts(setup_of(then)) == parts(setup_of(kernel))
    made = import_host(then, "a test")
    assert [loss.text for loss in made.losses] == []
    assert doctor_findings(build_host(made.spec)) == doctor_findings(kernel)
    return made


@pytest.mark.parametrize("name", host_names())
def test_doctor_finds_the_same_on_every_imported_host(simulated: Simulated, name: str) -> None:
    assert_same(simulated(name))


@pytest.mark.parametrize("name", BAD)
def test_doctor_finds_the_same_on_every_imported_bad_host(name: str) -> None:
    assert_same(BAD[name].build())


GPU_FOLDER = "/sys/bus/pci/devices/0000:65:00.0"
READ = (
    "/proc/cpuinfo", "/proc/cmdline", "/dev/kvm", "/sys/firmware/acpi/tables", "/sys/class/iommu", "/sys/module",
    "/proc/sys/kernel/osrelease", "/etc/os-release", "/etc/default/grub", "/sys/class/dmi/id/product_name",
    "/sys/class/iommu/dmar0/intel-iommu/ecap", "/sys/kernel/irq", "/etc/modprobe.d", "/etc/modprobe.d/x.conf",
    "/etc/containerd/config.toml", "/sys/module/vfio_pci/parameters/disable_vga", "/sys/class/graphics/fb0/name",
    "/sys/class/graphics/fb0/device", "/sys/devices/system/node/node0/cpulist", "/boot/loader/entries",
    "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts",
    "/lib/modules/6.8.0-31-generic/modules.dep", "/lib/modules/6.8.0-31-generic/modules.builtin",
    *(f"{GPU_FOLDER}/{name}" for name in ("resource", "boot_vga", "reset_method")),
)  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_an_unreadable_file_is_unreadable_in_the_archive(path: str) -> None:
    more = {"/etc/modprobe.d/x.conf": "", "/etc/containerd/config.toml": "", "/boot/loader/entries/x": ""}
    kernel = host(PlatformSpec(files=more, console="0000:65:00.0"))
    assert any(part.startswith(path) for part in parts(setup_of(kernel))), "doctor reads the path"
    kernel.faults.fail(HostPath(path), errno.EACCES)
    archived = parts(setup_of(ArchivedKernel(opened(kernel))))
    assert archived == parts(setup_of(kernel))
    assert archived[path].shown == "EACCES"


@pytest.mark.parametrize(
    "path", ["/proc/cmdline", "/sys/module", "/dev/kvm", "/sys/kernel/irq", f"{GPU_FOLDER}/boot_vga"]
)
def test_an_unreadable_file_is_a_reported_loss(path: str) -> None:
    kernel = host(PlatformSpec(console="0000:65:00.0"))
    kernel.faults.fail(HostPath(path), errno.EACCES)
    assert [loss.text for loss in imported(kernel).losses if loss.where == path and "EACCES" in loss.why]


def test_content_that_a_host_file_cannot_express_is_a_reported_loss(tmp_path: Path) -> None:
    kernel = host(PlatformSpec(console="0000:65:00.0"))
    kernel.tree.place(HostPath("/etc/modprobe.d/a b.conf"), constant("blacklist nouveau"))
    kernel.tree.place(HostPath("/sys/class/dmi/id/product_name"), File(read=lambda: b"\xff\xfe"))
    kernel.tree.place(HostPath("/sys/class/graphics/fb0/device"), Link("../a b"))
    (tmp_path / "a.tar.gz").write_bytes(packed(copy_host(kernel)))
    reported = {loss.where: loss.why for loss in import_archive(tmp_path / "a.tar.gz").losses}
    assert reported["/etc/modprobe.d/a b.conf"] == "found 'a name that is not safe in an archive'"
    assert reported["/sys/class/dmi/id/product_name"].startswith("found ")
    assert reported["/sys/class/graphics/fb0/device"] == "found 'a name that is not safe in an archive'"


def test_an_imported_function_has_its_recorded_original_driver(simulated: Simulated) -> None:
    kernel = simulated("2xA10")
    journal = DriverJournal(
        {PciAddress("0000:65:00.0"): "nouveau", PciAddress("0000:ca:00.0"): "../x", PciAddress("0000:99:00.0"): "x"}
    )
    kernel.tree.place(hostfiles.DRIVERS, File(read=lambda: hostfiles.JOURNAL_FORMAT.encode(journal)))
    more = {f"host{hostfiles.DRIVERS}": kernel.read(hostfiles.DRIVERS)}
    made = import_host(ArchivedKernel(unpack(io.BytesIO(packed(copy_host(kernel), more)))), "a test")
    native = {slot.at: made.spec.boards[slot.board].functions[0].native_driver for slot in made.spec.slots}
    assert (native["0000:65:00.0"], native["0000:ca:00.0"]) == ("nouveau", "nvidia")
    assert made.losses == ()


def test_a_damaged_driver_record_counts_as_absent(simulated: Simulated) -> None:
    more = {f"host{hostfiles.DRIVERS}": b"{"}
    kernel = ArchivedKernel(unpack(io.BytesIO(packed(copy_host(simulated("2xA10")), more))))
    assert import_host(kernel, "a test").spec == import_host(ArchivedKernel(opened(simulated("2xA10"))), "a test").spec


# Any host.

FUNCTIONS = ("0000:65:00.0", "0000:ca:00.0")
OF_GPUS = "/sys/bus/pci/devices"
BARS = "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n"
FILES = {
    "/proc/cmdline": ("quiet intel_iommu=on pcie_acs_override=downstream\n", "iommu=off intremap=off nomodeset\n", ""),
    "/proc/cpuinfo": ("processor\t: 0\nvendor_id\t: HygonGenuine\nmodel name\t: X\nflags\t\t: svm hypervisor\n\n",),
    "/etc/os-release": ('NAME="A"\nID=fedora\nVERSION_ID=42\n', "ID=talos\n"),
    "/etc/default/grub": ("GRUB_CMDLINE_LINUX='x'\n",),
    "/boot/efi/loader/entries/a.conf": ("",),
    "/etc/modprobe.d/a.conf": ("install vfio-pci /bin/false\n", "options vfio-pci ids=10de:2236\n# a word\n", "\n"),
    "/etc/modprobe.d/notes": ("",),
    "/usr/lib/modprobe.d/a.conf": ("blacklist nouveau\n",),
    "/lib/modprobe.d/b.conf": ("softdep nvidia pre: vfio-pci\n",),
    "/etc/containerd/config.toml": ('version = 2\nimports = ["/opt/x/*.toml"]\n', "version = 3\n", "= no\n"),
    "/opt/x/a.toml": ('[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n',),
    "/etc/crio/crio.conf.d/10.conf": ("[crio.runtime]\ncdi_spec_dirs = ['/opt']\n",),
    "/sys/class/iommu/dmar1/intel-iommu/ecap": ("f020df\n", "0\n", "odd\n"),
    "/sys/class/dmi/id/product_name": ("X9 \xe9\n",),
    "/sys/kernel/irq/0/chip_name": ("XT-PIC\n",),
    "/sys/kernel/irq/120/chip_name": ("IR-PCI-MSIX-0000:65:00.0\n",),
    "/sys/module/vfio_pci/parameters/ids": ("10de:2236\n",),
    "/sys/devices/system/node/node0/cpulist": ("0-63,128-191\n",),
    **{f"{OF_GPUS}/{function}/resource": (BARS, "odd\n", "") for function in FUNCTIONS},
    **{f"{OF_GPUS}/{function}/reset_method": ("bus\n", "") for function in FUNCTIONS},
    **{f"{OF_GPUS}/{function}/boot_vga": ("1\n", "0\n") for function in FUNCTIONS},
}
FOLDERS = ("/etc/modprobe.d", "/run/modprobe.d", "/sys/class/iommu/dmar7", "/etc/crio/crio.conf.d")
EXISTING = (
    "/sys/class/dmi/id/product_name", "/sys/firmware/acpi/tables", "/sys/firmware/acpi/tables/FACP", "/sys/kernel/irq",
    "/proc/cpuinfo", "/proc/cmdline", "/sys/class/iommu", "/sys/class/iommu/dmar0", "/sys/module", "/etc/os-release",
    "/lib/modules/6.8.0-31-generic/modules.dep", "/lib/modules/6.8.0-31-generic/modules.builtin", "/etc/default/grub",
    "/proc/sys/kernel/osrelease", "/sys/class/graphics", "/sys/devices/system/node/node1",
    *(f"{OF_GPUS}/{function}/{name}" for function in FUNCTIONS for name in ("resource", "reset_method", "reset")),
)  # fmt: skip
MODULES = st.sampled_from(["vfio_pci", "vfio", "nvidia", "nouveau", "vfio_iommu_type1", "8250", "nvidia_vgpu_vfio"])
SCREENS = st.builds(
    ScreenSpec,
    number=st.integers(0, 3),
    name=st.sampled_from([None, "EFI VGA", "nouveaudrmfb", "simpledrmdrmfb", ""]),
    device=st.sampled_from([None, "efi-framebuffer.0", "simple-framebuffer.0", *FUNCTIONS]),
)


@st.composite
def files(draw: st.DrawFn) -> dict[str, str]:
    paths = draw(st.sets(st.sampled_from(sorted(FILES)), max_size=8))
    return {path: draw(st.sampled_from(FILES[path])) for path in sorted(paths)}


PLATFORMS = st.builds(
    PlatformSpec,
    cpu=st.sampled_from(Cpu),
    virtualization=st.booleans(),
    hypervisor=st.booleans(),
    product=st.sampled_from(["PowerEdge R750", "KVM", ""]),
    release=st.sampled_from(["6.8.0-31-generic", "5.14.0-427.el9.x86_64", "6.12.0+"]),
    boot=st.sampled_from(Boot),
    kvm=st.booleans(),
    acpi=st.sampled_from([None, (), ("DMAR",), ("IVRS", "SSDT1"), ("IORT",)]),
    interrupt_remapping=st.booleans(),
    unsafe_interrupts=st.booleans(),
    modules=st.none() | st.lists(MODULES, unique=True).map(tuple),
    available=st.lists(MODULES, unique=True).map(tuple),
    console=st.none() | st.sampled_from(FUNCTIONS),
    screen=st.sampled_from(["EFI VGA", "VESA VGA"]),
    screens=st.lists(SCREENS, max_size=2).map(tuple),
    without_reset=st.sets(st.sampled_from(FUNCTIONS)).map(tuple),
    bars_unassigned=st.sets(st.sampled_from(FUNCTIONS)).map(tuple),
    missing=st.sets(st.sampled_from(EXISTING), max_size=4).map(tuple),
    folders=st.sets(st.sampled_from(FOLDERS)).map(tuple),
    files=files(),
)


@settings(deadline=None, max_examples=examples(25), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(PLATFORMS, st.sampled_from(["vfio-pci", "native", "none"]))
def test_doctor_finds_the_same_on_any_imported_platform(platform: PlatformSpec, driver: str) -> None:
    assert_same(host(platform, driver=driver))
