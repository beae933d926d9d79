"""The lint rule of proofs notices a write that takes a device without one."""

import runpy
from pathlib import Path

import pytest

RULE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/check_proofs.py"))


def found_in(source: str, path: str = "node/change/new.py") -> list[str]:
    return [finding.what for finding in RULE["findings"](path, source, set())]


@pytest.mark.parametrize(
    "write",
    [
        "kernel.write(path, b'1')",
        "self._kernel.write(path, b'1')",
        "change_host.kernel.write(path, b'1')",
        "tools.nvidia_smi('-r')",
        "change_host.tools.sriov_manage(gpu, enable=False)",
        "HostTools(root).nvidia_smi('-r')",
    ],
)
def test_a_write_without_a_proof_is_found(write: str) -> None:
    assert "without a Proof" in found_in(f"def take(kernel):\n    {write}\n")[0]
    assert "without a Proof" in found_in(f"class Taker:\n    def take(self):\n        {write}\n")[0]
    assert "without a Proof" in found_in(f"def take():\n    def inner():\n        {write}\n")[0]


def test_a_proof_must_be_spent_before_the_write() -> None:
    head = "def take(kernel, proof: Proof):\n"
    assert found_in(f"{head}    proof.spend('x')\n    kernel.write(path, b'1')\n") == []
    assert "does not spend" in found_in(f"{head}    kernel.write(path, b'1')\n")[0]
    assert "does not spend" in found_in(f"{head}    kernel.write(path, b'1')\n    proof.spend('x')\n")[0]


@pytest.mark.parametrize(
    ("made", "maker", "other"),
    [
        ("Proof", "node/change/steps/proving.py", "node/known/nokubelet.py"),
        ("NoKubelet", "node/known/nokubelet.py", "node/change/steps/proving.py"),
    ],
)
def test_proofs_are_made_in_their_modules_alone(made: str, maker: str, other: str) -> None:
    source = f"def take():\n    return {made}(x)\n"
    assert f"makes a {made}" in found_in(source)[0]
    assert f"makes a {made}" in found_in(source, other)[0]
    assert found_in(source, maker) == []


def test_the_sources_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert RULE["main"]() == 0
    assert capsys.readouterr().out == ""
