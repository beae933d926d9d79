"""pci.ids files, good and bad."""

from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.cli.parameters.options import read_pci_ids
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciId
from gpuvirt.model.inventory import pciids
from gpuvirt.paths import HostRoots

GOOD = """\
# a comment
8086  Intel Corporation
\t2331  DH89xxCC Chap Counter

10de  NVIDIA Corporation
\t2331  GH100 [H100 PCIe]
\t\t10de 1626  H100 PCIe board
# a comment in between

\t2236  GA102GL [A10]
C 03  Display controller
\t00  VGA compatible controller
\t\t01  8514 controller
"""


def test_devices_belong_to_their_vendor_across_blank_lines() -> None:
    assert pciids.parse(GOOD, where="pci.ids") == {
        PciId(0x8086, 0x2331): "DH89xxCC Chap Counter",
        PciId(0x10DE, 0x2331): "GH100 [H100 PCIe]",
        PciId(0x10DE, 0x2236): "GA102GL [A10]",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no device"),
        ("\t2236  GA102GL [A10]\n", r"mine:1: .*before any vendor"),
        ("10de  NVIDIA\n\t2236  A10\nhello\n", r"mine:3: 'hello': not a line of a pci.ids file"),
        ("10de  NVIDIA\n\t22G6  A10\n", r"mine:2"),
        ("10DE  NVIDIA\n\t2236  A10\n", r"mine:1"),
        ("{}", r"mine:1"),
    ],
)
def test_a_bad_file_is_reported_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pciids.parse(text, where="mine")


@given(st.text(max_size=200))
def test_arbitrary_text_is_read_or_refused(text: str) -> None:
    try:
        assert pciids.parse(text, where="mine")
    except ConfigError:
        return


def host(folder: Path, content: bytes) -> HostRoots:
    path = folder / "usr/share/misc/pci.ids"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return HostRoots.under(folder)


def test_the_systems_file_is_found_below_the_host_root(tmp_path: Path) -> None:
    ids = read_pci_ids(None, host(tmp_path, b"10de  NVIDIA\n\t3182  GB110 [B300]\n"))
    assert ids.text(PciId(0x10DE, 0x3182)) == "GB110 [B300]"


@pytest.mark.parametrize("content", [b"no pci.ids", b"\xff\xfe\x00"])
def test_a_bad_system_file_is_ignored_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    ids = read_pci_ids(None, host(tmp_path, content))
    assert ids.text(PciId(0x10DE, 0xFFFE)) is ids.text(PciId(0x10DE, 0xFFFD)) is None
    assert ids.text(PciId(0x10DE, 0x2236)) == "GA102GL [A10]"
    assert capsys.readouterr().err.count("the system's pci.ids is ignored") == 1


def test_the_systems_file_is_not_read_for_known_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = read_pci_ids(None, host(tmp_path, b"no pci.ids"))
    assert ids.text(PciId(0x10DE, 0x2236)) == "GA102GL [A10]"
    assert not capsys.readouterr().err


def test_a_search_of_the_shipped_file_finds_the_parsed_names() -> None:
    text = (resources.files(pciids.__package__) / "data/pci.ids").read_text("utf-8")
    parsed, shipped = pciids.parse(text, where="shipped"), pciids.shipped()
    assert {pci_id: shipped[pci_id] for pci_id in parsed} == parsed
    assert len(shipped) == len(parsed) > 3000
    assert PciId(0x10DE, 0xFFFE) not in shipped
    assert PciId(0xFFFE, 0x2236) not in shipped


@pytest.mark.parametrize("content", [b"no pci.ids", b"\xff\xfe\x00"])
def test_a_bad_file_named_by_the_user_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_pci_ids(path, HostRoots.under(tmp_path))
    with pytest.raises(ConfigError, match="can't be read"):
        read_pci_ids(tmp_path / "none", HostRoots.under(tmp_path))
