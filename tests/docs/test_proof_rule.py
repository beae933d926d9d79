"""The lint rule of proofs notices a write that takes a device without one."""

import runpy
from pathlib import Path
from typing import get_type_hints

import pytest
from msgspec.structs import fields

from gpuvirt.model.workers.hypervisor import Call, Hypervisor, VmProof
from gpuvirt_schedules.controller.kubevirt.connection import VmWriter
from gpuvirt_schedules.hypervisors.messages import BackEnd

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
    ("made", "maker"),
    [
        ("Proof(ProofKind.FORCED, ['x'])", "agent/change/steps/proving.py"),
        ("NoKubelet()", "agent/known/nokubelet.py"),
        ("SettledAt(now_s)", "agent/allocators.py"),
        ("VmProof(vm.key)", "gpuvirt_schedules/decide/matching.py"),
    ],
)
def test_proofs_are_made_in_their_modules_alone(made: str, maker: str) -> None:
    for source in (f"def take():\n    return {made}\n", f"FREE = {made}\n", f"free = lambda vm: hypervisor.{made}\n"):
        assert "only these modules make one" in found_in(source)[0]
        assert found_in(source, maker) == []


def test_each_call_to_a_hypervisor_has_the_proof_of_whose_vm_it_is() -> None:
    for method in (Hypervisor.call, BackEnd.make, VmWriter.make):
        assert Call in get_type_hints(method).values()
    (proof,) = (field for field in fields(Call) if field.type is VmProof)
    assert proof.required


def test_the_sources_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert RULE["main"]() == 0
    assert capsys.readouterr().out == ""
