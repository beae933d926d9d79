"""Host files: those that come with gpuvirt, and invalid ones."""

from pathlib import Path

import pytest

from gpuvirt.errors import ConfigError
from gpuvirt.paths import HostPath
from gpuvirt_sim.archives.export import LeavesTargetError, export
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.files.tree import constant
from gpuvirt_sim.hostspec import HostSpec, host_names, load_host


def test_hosts_that_must_exist() -> None:
    assert {
        "2xA10", "4xT4", "8xA100", "8xH100", "4xL40S", "4xRTX2060", "8xMI300X", "2xRTX4090-one-group", "2xA10-no-iommu",
    } <= set(host_names())  # fmt: skip


@pytest.mark.parametrize("name", host_names())
def test_every_host_can_be_built_twice_and_is_the_same(name: str) -> None:
    one, other = (build_host(load_host(name), where=name) for _ in range(2))
    assert sorted(path for path, _ in one.tree.walk()) == sorted(path for path, _ in other.tree.walk())
    assert one.writes == []


def test_an_unknown_host_is_reported_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"3xA10: .*no such simulated host; there are 2xA10, "):
        load_host("3xA10")


ONE = "about: x\nslots: [{at: '0000:01:00.0', board: A10"
T4 = "about: x\nslots: [{at: '0000:01:00.0', board: T4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("about: x\nslots: [{at: hello, board: A10}]", r"\$\.slots\[0\]: .*'hello' is not a PCI address"),
        ("about: x\nslots: [{at: 0000:01:00.0, board: A11}]", r"\$\.slots\[0\]: .*no board .A11.; the boards are "),
        ("about: x\nslots: [{at: 0000:01:00.0}]", r"mine.yaml:2: \$\.slots\[0\]: lacks the key board"),
        ("about: x\nslots: [{at: 0000:01:00.0, board: A10, drivr: y}]", r"\$\.slots\[0\]\.drivr: no such key"),
        ("about: x\nslots: [{at: 0000:01:00.0, board: A10, behind: '0000:00:01.0'}]", r"no '0000:00:01.0' among"),
        ("about: x\niommu: false\nslots: [{at: 0000:01:00.0, board: A10, driver: vfio-pci}]", r"Invalid argument"),
        (
            f"{ONE}}}, {{at: '0000:01:00.0', board: A10}}]",
            r"\$\.slots\[1\]: .*there is a function at 0000:01:00.0 already",
        ),
        (f"{ONE}, group: -5}}]", r"mine.yaml:2: \$\.slots\[0\]\.group: expected a whole number >= 0, found -"),
        (f"{ONE}, numa: 1024}}]", r"\$\.slots\[0\]\.numa: expected a whole number <= 1023, found 1024"),
        (f"{ONE}, vfs: -1}}]", r"\$\.slots\[0\]\.vfs: expected a whole number >= 0, found -"),
        (f"{ONE}, vfs: 100000}}]", r"\$\.slots\[0\]\.vfs: expected a whole number <= 256, found 100000"),
        (f"{ONE}, vfs: 33}}]", r"\$\.slots\[0\]: .*33 VFs are requested, but board A10 has 32"),
        (f"{ONE}, driver: ../../x}}]", r"\$\.slots\[0\]\.driver: expected text that matches"),
        (f"{T4}, vgpus: {{GRID T4-1Q: 17}}}}]", r"\$\.slots\[0\]: .*17 x GRID T4-1Q don't fit, only 16 do"),
        (f"{T4}, vgpus: {{GRID T4-8Q: 1, GRID T4-1Q: 1}}}}]", r"\$\.slots\[0\]: .*1 x GRID T4-1Q don't fit, only 0 do"),
        (f"{T4}, vgpus: {{GRID T5: 1}}}}]", r"\$\.slots\[0\]: .*no vGPU type 'GRID T5'; there are GRID T4-1Q, "),
        (f"{T4}, vgpus: {{GRID T4-1Q: 0}}}}]", r"\$\.slots\[0\]\.vgpus\[\.\.\.\]: expected a whole number >= 1"),
        (f"{T4}, driver: vfio-pci, group: 1, vgpus: {{GRID T4-1Q: 1}}}}]", r"\$\.slots\[0\]: .*need the driver nvidia"),
        ("about: x\niommu: false\nslots: [{at: '0000:01:00.0', board: L40S, vfs: 1}]", r"slots\[0\]: .*need an IOMMU"),
        ("about: x\nslots: [{at: '0000:ff:1f.0', board: A10, vfs: 32}]", r"\$\.slots\[0\]: .*is not a PCI address"),
        ("about: x\nslots: [{at: '0000:01:00.7', board: RTX4090}]", r"\$\.slots\[0\]: .*'0000:01:00.8' is not a PCI"),
        (
            "about: x\negm: [{name: ../../../../x, gpus: []}]",
            r"mine.yaml:2: \$\.egm\[0\]\.name: expected text that matches",
        ),
        ("about: x\negm: [{name: egm0, gpus: [x]}]", r"\$\.egm\[0\]: .*'x' is not a PCI address"),
        ("about: x\negm: [{name: egm0, gpus: []}, {name: egm0, gpus: []}]", r"\$\.egm\[1\]: .*egm0 is listed twice"),
        (
            "about: x\nboards: {b: {functions: []}}",
            r"\$\.boards\[\.\.\.\]\.functions: expected a list with at least 1 in it",
        ),
        (
            "about: x\nboards: {b: {functions: [{id: 1:2, class: '3'}]}}",
            r"functions\[0\]\.class: expected text that matches",
        ),
        ("slots: []", r"lacks the key about"),
        ("about: [", r"mine.yaml:2: \$: not YAML"),
    ],
)
def test_an_invalid_file_is_reported_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        build_host(load_host(str(path)), where=str(path))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_host(str(tmp_path / "none.yaml"))


def test_a_host_can_have_its_own_boards(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "about: an unknown card\n"
        "boards:\n  new: {functions: [{id: '10de:3182', class: '030200'}]}\n"
        "slots: [{at: '0000:01:00.0', board: new, driver: vfio-pci, group: 1}]\n"
    )
    spec = load_host(str(path))
    assert isinstance(spec, HostSpec)
    assert list(build_host(spec).pci.functions) == ["0000:01:00.0"]


def test_a_host_is_not_written_outside_its_folder(tmp_path: Path) -> None:
    kernel = build_host(load_host("2xA10"))
    kernel.tree.place(HostPath("/sys/../../outside/file"), constant("x"))
    with pytest.raises(LeavesTargetError, match=r"/sys/\.\. would be written outside"):
        export(kernel, tmp_path / "host")
    assert [path.name for path in tmp_path.iterdir()] == ["host"]


def test_a_device_with_a_number_has_a_link_of_that_number_while_it_exists() -> None:
    kernel = build_host(load_host("2xA10"), where="2xA10")
    numbers = HostPath("/sys/dev/char")
    folder = HostPath("/sys/devices/virtual/x/x0")
    kernel.tree.place(HostPath(f"{folder}/dev"), constant("240:7"))
    assert kernel.tree.real_path(HostPath(f"{numbers}/240:7")) == folder
    kernel.tree.remove(HostPath("/sys/devices/virtual/x"))
    assert "240:7" not in kernel.listdir(numbers)


def test_each_vfio_group_has_a_link_by_its_number() -> None:
    kernel = build_host(load_host("2xA10"), where="2xA10")
    numbers = HostPath("/sys/dev/char")
    groups = [HostPath(f"/sys/class/vfio/{name}") for name in kernel.listdir(HostPath("/sys/class/vfio"))]
    assert groups
    for folder in groups:
        number = kernel.read(HostPath(f"{folder}/dev")).decode().strip()
        assert kernel.tree.real_path(HostPath(f"{numbers}/{number}")) == kernel.tree.real_path(folder)
