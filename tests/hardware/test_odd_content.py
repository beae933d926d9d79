"""Malformed content of /sys and /proc: the agent works, prints the content legibly, and reports the entry."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuvirt.agent.kubelet import wire
from gpuvirt.cli.output import render
from gpuvirt.facts.ids import IommuGroup, PciAddress
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.paths import HostPath, HostRoots
from gpuvirt_sim.files.tree import Link
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated

A10 = "nvidia.com/GA102GL_A10"
GPU, OTHER = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
FOLDER = f"/sys/bus/pci/devices/{GPU}"
NOT_UTF_8 = "\udcff\udcfe"
"""The bytes ff fe of a file name, as Python decodes them."""


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a terminal that wraps no line."""
    monkeypatch.setenv("COLUMNS", "1000")


def shown(node: SimNode, capsys: pytest.CaptureFixture[str]) -> str:
    """Render the node's view in every output format, and return the text for users."""
    msgspec.json.encode(node.view)
    for resource in node.view.resources:
        wire.device_list(resource, unknown_numa_is_node_0=False)
    render.devices(node.view, every=True)
    return capsys.readouterr().out


@pytest.mark.parametrize("folder", ["/sys/bus/pci/devices", "/sys/bus/mdev/devices", "/sys/class/mdev_bus"])
async def test_a_sysfs_entry_whose_name_is_not_utf_8_is_reported(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    kernel = simulated("4xT4")
    kernel.tree.place(HostPath(f"{folder}/{NOT_UTF_8}"), Link("../../../devices/x"))
    async with running_node(kernel, tmp_path) as node:
        assert f"MalformedSysfsEntry: {folder}/\\xff\\xfe" in shown(node, capsys)
        assert node.offered


async def test_a_driver_whose_name_is_not_utf_8_is_shown_escaped(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = simulated("2xA10")
    kernel.tree.place(HostPath(f"{kernel.pci.functions[GPU].folder}/driver"), Link(f"../../drivers/{NOT_UTF_8}"))
    kernel.tree.remove(HostPath(f"{kernel.pci.functions[GPU].folder}/vfio-dev"))
    async with running_node(kernel, tmp_path) as node:
        assert "bound to \\xff\\xfe" in shown(node, capsys)
        assert node.offered == {A10: {OTHER: True}}


@pytest.mark.parametrize(
    ("command", "shown_as"),
    [(b"[/x]", "[/x]"), (b"\xff", "\\xff"), (b"a\x1b[2Jb", "a\\x1b[2Jb"), (b":smile:", ":smile:")],
)
async def test_a_process_with_a_malformed_name_is_shown_escaped(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: bytes, shown_as: str
) -> None:
    kernel = simulated("2xA10")
    process = kernel.start_vm(IommuGroup(12))
    kernel.faults.answer(HostPath(f"/proc/{process.pid}/comm"), command + b"\n")
    async with running_node(kernel, tmp_path) as node:
        assert f"{shown_as} (pid {process.pid})" in shown(node, capsys)


async def test_a_vgpu_type_with_brackets_in_its_name_is_shown(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = simulated("4xT4")
    (vgpu, *_) = kernel.listdir(HostPath("/sys/bus/mdev/devices"))
    kernel.faults.answer(HostPath(f"/sys/bus/mdev/devices/{vgpu}/mdev_type/name"), b"[/x] T4\n")
    async with running_node(kernel, tmp_path) as node:
        assert "1 x [/x] T4" in shown(node, capsys)


@pytest.mark.parametrize(
    "content", [b"-2", b"1024", b"9223372036854775808", b"99999999999999999999", b"[/x]", b"9" * 4096]
)
async def test_an_invalid_numa_node_is_reported_as_malformed(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath(f"{FOLDER}/numa_node"), content + b"\n")
    async with running_node(kernel, tmp_path) as node:
        assert node.gpu(GPU).numa_node is None
        assert f"MalformedSysfsEntry: {FOLDER}/numa_node can't be understood: found '{content[:60].decode()}" in shown(
            node, capsys
        )
        assert node.offered == {A10: {GPU: True, OTHER: True}}


@pytest.mark.parametrize("content", [b"0", b"1023"])
async def test_a_valid_numa_node_is_read(simulated: Simulated, tmp_path: Path, content: bytes) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath(f"{FOLDER}/numa_node"), content + b"\n")
    async with running_node(kernel, tmp_path) as node:
        assert node.gpu(GPU).numa_node == int(content)


@pytest.mark.parametrize(
    ("attribute", "content"),
    [
        ("vendor", b"[/x]"),
        ("vendor", b"0x110de"),
        ("device", b"0x12236"),
        ("device", b"0x" + b"f" * 4000),
        ("class", b"0x1030200"),
    ],
)
async def test_an_id_that_is_too_long_is_reported_as_malformed(
    simulated: Simulated, tmp_path: Path, capsys: pytest.CaptureFixture[str], attribute: str, content: bytes
) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath(f"{FOLDER}/{attribute}"), content + b"\n")
    async with running_node(kernel, tmp_path) as node:
        assert f"MalformedSysfsEntry: {FOLDER}/{attribute} cannot be read: found '{content[:60].decode()}" in shown(
            node, capsys
        )
        assert node.offered == {A10: {OTHER: True}}


async def test_a_revision_that_is_too_long_is_reported_as_malformed(simulated: Simulated, tmp_path: Path) -> None:
    kernel = simulated("2xA10")
    kernel.faults.answer(HostPath(f"{FOLDER}/revision"), b"0x1a1\n")
    async with running_node(kernel, tmp_path) as node:
        assert [(note.code, note.subject) for note in node.view.problems] == [
            (ReasonCode.MALFORMED_SYSFS_ENTRY, f"{FOLDER}/revision")
        ]


@pytest.mark.parametrize(
    ("parse", "content"),
    [
        (attributes.number, "1_0"),
        (attributes.number, "\u0663"),
        (attributes.pci_id, "10de"),
        (attributes.pci_id, "0x1_0"),
    ],
)
def test_a_number_that_only_python_accepts_is_refused(parse: Callable[[str], int], content: str) -> None:
    assert int(content, 16)
    with pytest.raises(ValueError, match=content):
        parse(content)


def test_a_folder_that_cannot_be_read_has_unknown_names(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    kernel = RealKernel(HostRoots.under(tmp_path))
    assert attributes.names_or_raise(kernel, HostPath("/missing")) == []
    with pytest.raises(OSError, match="symbolic links"):
        attributes.names_or_raise(kernel, HostPath("/loop"))
