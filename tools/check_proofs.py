"""Checks that every write that takes a device from its users takes the proof that nobody uses it.

- `Proof(...)`, `NoKubelet(...)`, `VmProof(...)` (whose VM a hypervisor is called for) and `SettledAt(...)` (by what an
  allocation ends) are called by the modules that make them, and by no other.
- A file of the kernel is written, and a program that changes a GPU is run, by functions that take a `Proof` and spend
  it, or that stand below as harmless, with the reason.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shipped import ROOT, modules

MAKERS: Mapping[str, frozenset[str]] = {
    "Proof": frozenset({"hardware/access/proof.py", "agent/change/steps/proving.py", "agent/change/steps/leasing.py"}),
    "NoKubelet": frozenset({"agent/known/nokubelet.py"}),
    "SettledAt": frozenset(
        {
            "model/allocation/ledger.py",
            "agent/allocators.py",
            "agent/kubelet/accountwatch.py",
            "cli/podaccount.py",
        }
    ),
    "VmProof": frozenset({"gpuvirt_schedules/decide/matching.py"}),
}
"""The modules that make each kind of proof."""

HARMLESS: Mapping[str, str] = {
    "hardware/archives/redaction.py:*": "passes a write on",
    "hardware/functions/sriov.py:create_vfs": "the kernel refuses it where there are VFs (EBUSY)",
    "hardware/vgpu/mdev.py:Mdev.create": "a vGPU that does not exist yet has no user",
    "hardware/vgpu/vendor_vfio.py:VendorVfio.create": "a VF without a type has no user",
    "hardware/programs/nvidiasmi.py:create_instance": "a GPU instance that does not exist yet has no user",
    "hardware/programs/nvidiasmi.py:read_instances": "reads",
    "hardware/programs/nvidiasmi.py:read_modes": "reads",
    "hardware/programs/nvidiasmi.py:read_supported": "reads",
    "hardware/programs/vgpuscheduler.py:read_scheduler": "reads",
    "hardware/programs/vgpuscheduler.py:read_arguments": "reads",
    "hardware/programs/containerdriver.py:*": "lists the GPUs",
    "agent/change/driverphase.py:_Taking._take": "writes driver_override, which unbinds nothing",
    "agent/change/driverphase.py:clear_override": "clears driver_override, which unbinds nothing",
    "agent/change/driverphase.py:unlock": "lets NVIDIA's driver admit clients again",
    "agent/change/steps/proving.py:locked": "NVIDIA's driver refuses the lock while it has clients",
}
"""The functions that write or run such a program without a proof, with the reason why nobody loses a device by it."""

WRITES = frozenset({"write", "sriov_manage", "nvidia_smi"})
"""The methods of `Kernel` and `Tools` that can change a device."""
RECEIVERS = frozenset({"kernel", "_kernel", "tools", "_tools"})
"""The names of kernels and tools; `HostTools(...)` counts as well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A write without a proof, or a proof made elsewhere."""

    place: str
    line: int
    what: str


def findings(path: str, source: str, used: set[str]) -> Iterator[Finding]:
    """Yield what is wrong in a module; `used` collects the entries of `HARMLESS` that it needs."""
    tree = ast.parse(source)
    for call in ast.walk(tree):
        kind = _name(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and kind in MAKERS and path not in MAKERS[kind]:
            makers = ", ".join(sorted(MAKERS[kind]))
            yield Finding(path, call.lineno, f"makes a {kind}; only these modules make one: {makers}")
    for place, function in _functions(tree.body, ""):
        yield from _in_function(f"{path}:{place}", path, function, used)


def _functions(body: Iterable[ast.stmt], above: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a module and the methods of its classes; nested functions count as their outer one."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{above}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{above}{node.name}.")


def _in_function(
    place: str, path: str, function: ast.FunctionDef | ast.AsyncFunctionDef, used: set[str]
) -> Iterator[Finding]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    writes = [call for call in calls if _writes(call)]
    if not writes:
        return
    if _takes_proof(function):
        spends = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "spend"]
        if not spends or min(call.lineno for call in spends) > min(call.lineno for call in writes):
            yield Finding(place, function.lineno, f"{function.name} does not spend its proof before it writes")
        return
    entry = next((entry for entry in (place, f"{path}:*") if entry in HARMLESS), None)
    if entry is None:
        call = writes[0]
        yield Finding(place, call.lineno, f"{ast.unparse(call.func)} is called without a Proof; take one, and spend it")
    else:
        used.add(entry)


def _writes(call: ast.Call) -> bool:
    """Return whether a call is one of a kernel or of tools that can change a device."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WRITES:
        return False
    receiver = call.func.value
    return _name(receiver.func if isinstance(receiver, ast.Call) else receiver) in RECEIVERS | {"HostTools"}


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _takes_proof(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return any(argument.annotation is not None and _name(argument.annotation) == "Proof" for argument in arguments)


def main() -> int:
    """Print the findings; return 1 if there are any."""
    used: set[str] = set()
    found: list[str] = []
    for path, file in modules():
        at = file.relative_to(ROOT).as_posix()
        found += [f"{at}:{finding.line}: {finding.what}" for finding in findings(path, file.read_text(), used)]
    found += [f"tools/check_proofs.py: {entry} in HARMLESS writes nothing" for entry in HARMLESS.keys() - used]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
