"""The fixes that gpuvirt advises go through its own gate: none writes to a device's files by hand."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuvirt
from tests.diagnosis.doctor.badhosts import BAD
from tests.diagnosis.doctor.sickhost import examine, findings

MODEL = Path(gpuvirt.__file__).parent / "model"
BY_HAND = re.compile(r"uuidgen|\becho\b.*>|sriov-manage|> ?/sys|/bind\b|/unbind\b|driverctl (?:un)?set-override")
"""driverctl (0.111) unbinds the device at once, even with --noprobe, and even while a VM uses it."""

OTHERS = {
    "echo 1 > /sys/bus/pci/rescan": "finds a card again; a rescan changes no function that is there",
    "at boot, and reboot; or: echo 0 > ": "no command of gpuvirt changes the VFs of a GPU on vfio-pci",
    "; echo > ": "clears a foreign override's name, which gpuvirt does not touch; no driver changes by that",
    "echo {address} > {sysfs.DRIVERS_PROBE}": "a probe of one GPU beside NVSwitches may hang, so gpuvirt makes none",
    "echo {module} > /etc/modules-load.d/kvm.conf": "a module of KVM, no device",
    ">> /etc/modprobe.d/vfio.conf": "the order of modules at the next boot, no device",
    "`sriov-manage`, `nvidia-smi`": "names the programs that are missing",
}
"""Texts with commands that gpuvirt has no own one for, with the reason."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield the texts of the model, each with its place; expressions in them stand as in the source."""
    for path in sorted(MODEL.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
            ):
                text = ast.unparse(node) if isinstance(node, ast.JoinedStr) else str(node.value)
                yield f"{path.relative_to(MODEL)}:{node.lineno}", text


def test_no_text_of_the_model_names_a_write_by_hand() -> None:
    found = [(place, text) for place, text in texts() if BY_HAND.search(text)]
    assert found, "the search finds the texts that are listed"
    assert [(place, text) for place, text in found if not any(known in text for known in OTHERS)] == []


@pytest.mark.parametrize("name", BAD)
def test_no_fix_of_a_bad_host_names_a_write_by_hand(name: str) -> None:
    kernel = BAD[name].build()
    listed = [line for finding in findings(examine(kernel)) for line in finding.fix if BY_HAND.search(line)]
    allowed = re.compile(r"/etc/mod|rescan|drivers_probe|VFs that vfio-pci has enabled")
    assert all(allowed.search(line) for line in listed), listed
