"""Unreadable and malformed evidence: it is reported as unknown, never as absent, and doctor goes on."""

import errno
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cli.output import diagnosisrender as shown
from gpuvirt.diagnosis.checks.drivers import parse_ids
from gpuvirt.diagnosis.checks.firmware import cpu_flags
from gpuvirt.diagnosis.checks.iommu import can_remap
from gpuvirt.diagnosis.checks.kubelet import parse_cpulist
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.facts.pci import parse_bars
from gpuvirt.facts.platform import MOST_SHOWN, legible
from gpuvirt.facts.runtimes import parse_toml
from gpuvirt.model.inventory.nearness import nearest, nearest_names
from gpuvirt.model.kubevirt import kubevirt
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostPath
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.files.blocking import WouldBlock
from gpuvirt_sim.kernel import SimKernel
from tests.diagnosis.doctor.sickhost import examine, findings, host

FILES = PlatformSpec(
    files={
        "/etc/modprobe.d/vfio.conf": "options vfio-pci ids=10de:2236\n",
        "/etc/containerd/config.toml": "version = 3\n",
    },
    console="0000:65:00.0",
)


def full_host() -> SimKernel:
    """Return a host that has every path that doctor reads, and a VM."""
    kernel = host(FILES)
    kernel.start_vm(IommuGroup(12))
    return kernel


def read_paths() -> list[HostPath]:
    kernel = full_host()
    examine(kernel)
    return sorted(path for path in kernel.reads if "/sys/kernel/irq/" not in path)


PATHS = read_paths()
FOLDERS = [
    "/sys/kernel/iommu_groups", "/sys/class/iommu", "/sys/firmware/acpi/tables", "/sys/module", "/etc/modprobe.d",
    "/sys/class/graphics", "/sys/kernel/irq", "/dev/kvm",
]  # fmt: skip


def test_attributes_whose_read_may_block_are_never_read() -> None:
    assert not [path for path in PATHS if path.endswith(("/uevent", "/driver_override", "/sriov_numvfs"))]
    kernel = full_host()
    gpu = PciAddress("0000:65:00.0")
    with pytest.raises(WouldBlock):
        kernel.rebind(gpu, "nvidia")
    kernel.reads.clear()
    examine(kernel)
    assert HostPath("/sys/bus/pci/devices/0000:65:00.0/reset_method") not in kernel.reads
    assert HostPath("/sys/bus/pci/devices/0000:ca:00.0/reset_method") in kernel.reads


@pytest.mark.parametrize("path", [*PATHS, *FOLDERS])
def test_an_unreadable_path_is_no_error(path: str) -> None:
    kernel = full_host()
    before = examine(kernel)
    kernel.faults.fail(HostPath(path), errno.EIO)
    report = examine(kernel)
    errors = {finding.code for finding in findings(report) if finding.level is Level.ERROR}
    assert errors <= {finding.code for finding in findings(before) if finding.level is Level.ERROR}


@pytest.mark.parametrize(
    "path",
    [
        "/proc/cpuinfo", "/proc/cmdline", "/dev/kvm", "/sys/kernel/iommu_groups", "/etc/modprobe.d", "/sys/kernel/irq",
        "/etc/modprobe.d/vfio.conf", "/etc/containerd/config.toml",
        "/sys/bus/pci/devices/0000:65:00.0/resource", "/sys/bus/pci/devices/0000:65:00.0/reset_method",
        "/sys/bus/pci/devices/0000:65:00.0/boot_vga", "/sys/devices/system/node/node0/cpulist",
    ],
)  # fmt: skip
def test_an_unreadable_path_is_reported_with_its_errno(path: str) -> None:
    kernel = full_host()
    kernel.faults.fail(HostPath(path), errno.EACCES)
    reported = [finding for finding in findings(examine(kernel)) if finding.code is FindingCode.NOT_READ]
    assert any(thing.path == path and thing.value == "EACCES" for finding in reported for thing in finding.seen)


CONTENTS = [b"", b"\xff\xfe", b"\0", b"9" * 5000, b"[[[[", b"\n\n:=-,", b"A" * 200_000, b"\x1b[2J[/x]:smile:"]


def survives(kernel: SimKernel, capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(kernel)
    encoded = msgspec.json.encode(report)
    assert msgspec.json.decode(encoded)["version"] == 1
    assert b"\\u001b" not in encoded, "a terminal would obey it, from `jq -r` too"
    shown.report(report, every=True)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("content", CONTENTS)
def test_malformed_content_of_any_file_is_survived(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = full_host()
    for path in PATHS:
        kernel.faults.answer(path, content)
    survives(kernel, capsys)


@pytest.mark.parametrize("content", CONTENTS)
def test_malformed_content_of_host_files_is_survived(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = full_host()
    for path in PATHS:
        if not path.endswith(("/vendor", "/device", "/class", "/config")):
            kernel.faults.answer(path, content)
    survives(kernel, capsys)


PARSERS: list[Callable[[str], object]] = [
    cpu_flags, parse_bars, can_remap, parse_ids, parse_cpulist, parse_toml, legible,
]  # fmt: skip


@given(st.text() | st.text(alphabet="0123456789abcdefx-,:= []\n\"'.{}"))
def test_any_text_is_parsed_or_refused_with_a_config_error(text: str) -> None:
    for parse in PARSERS:
        parse(text)
    assert len(legible(text)) <= MOST_SHOWN + 3
    try:
        kubevirt.parse(f"kind: KubeVirt\nspec: {text}", where="f")
    except ConfigError:
        return


def test_unclosed_brackets_are_refused() -> None:
    assert parse_toml("x = " + "[" * 100_000) is None


@given(st.frozensets(st.integers(0, 8191), max_size=40))
def test_written_cpu_lists_are_parsed_back(cpus: frozenset[int]) -> None:
    assert parse_cpulist(",".join(map(str, sorted(cpus)))) == cpus


@pytest.mark.parametrize(("text", "count"), [("0-3,8", 5), ("", 0), ("0-8191", 8192)])
def test_cpu_lists(text: str, count: int) -> None:
    assert len(parse_cpulist(text) or ()) == count


@pytest.mark.parametrize("text", ["0-", "-1", "a", "0-99999", "1,,2", "0-8192"])
def test_invalid_cpu_lists_are_refused(text: str) -> None:
    assert parse_cpulist(text) is None


def test_bar_sizes() -> None:
    small, large = "0x0000000000001000 0x0000000000001fff 0x0000000000040200", "0x0 0x7ffffffff 0x14220c"
    assert parse_bars(f"{small}\n{large}\n0x0 0x0 0x0\n") == {0: 4096, 1: None}
    assert parse_bars("0x0 0x0") is None
    assert parse_bars(f"{small}\n0x0 0x7f 0x20040101\n") == {0: 4096}, "ports of I/O are not needed"


WORDS = st.text("abcdefg0123456789", min_size=1, max_size=30)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=5))
def test_a_name_is_nearest_to_itself_in_any_case(name: str, others: list[str]) -> None:
    assert nearest(name.upper(), [*others, name]) == name
    assert nearest_names(name, [*others, name], 1) == (name,)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nvidia.com/TU104GL_T4", "nvidia.com/TU104GL_TESLA_T4"),
        ("nvidia.com/GA102GL_A1O", "nvidia.com/GA102GL_A10"),
        ("nvidia.com/ga102gl-a10", "nvidia.com/GA102GL_A10"),
        ("GA102GL_A10", "nvidia.com/GA102GL_A10"),
        ("nvidia.com/A10", "nvidia.com/GA102GL_A10"),
        ("nvidia.com/AD102GL_L40S", None),
        ("amd.com/MI300X", None),
    ],
)
def test_suggested_names(name: str, meant: str | None) -> None:
    assert nearest(name, ["nvidia.com/TU104GL_TESLA_T4", "nvidia.com/GA102GL_A10"]) == meant
