"""Measures how long a vGPU config takes in the kernel lab's guest, where a real kernel creates and removes the mdevs.

    .venv/bin/python -m bench.realkernel [FLAVOUR]

Needs what `make test-kernel` needs. The guest runs without KVM, and each operation goes to it over a serial port, so
the table also has the time of the writes alone.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from lab.kernel.guest import booted
from lab.kernel.kit import Flavour, prepare
from lab.kernel.notools import NO_TOOLS
from tests.agent.change.changes import NOBODY, change_vgpus

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.proof import Proof, ProofKind
from gpuvirt.hardware.scan import scan
from gpuvirt.hardware.vgpu.registry import backend_of
from gpuvirt.model.change.desired import DesiredVgpus

GPUS = (PciAddress("0000:07:01.0"), PciAddress("0000:07:02.0"))
SMALL, LARGE = VgpuType("GRID T4-1B"), VgpuType("GRID T4-2B")
EACH = 16
"""vGPUs of the small type on each GPU; 12 of the large type fit."""


def vgpu_change_s(change_host: ChangeHost, types: Mapping[str, int]) -> float:
    """Apply a vGPU config to each GPU; return how long that takes, or exit with the reasons of a failure."""
    began = time.monotonic()
    for gpu in GPUS:
        if reasons := change_vgpus(change_host, gpu, DesiredVgpus(types), NOBODY, lambda _: None):
            raise SystemExit("\n".join(reason.text for reason in reasons))
    return time.monotonic() - began


def writes_s(kernel: Kernel) -> float:
    """Create as many mdevs by the back end alone, and remove them; return how long the creation took."""
    mdev = backend_of(Framework.MDEV)
    began = time.monotonic()
    for number in range(len(GPUS) * EACH):
        vgpu = VgpuId(f"83b8f4f2-509f-382f-3c1e-e6bfe0fa10{number:02x}")
        mdev.create(kernel, GPUS[number % len(GPUS)], SMALL, vgpu)
    took_s = time.monotonic() - began
    for host in scan(kernel).vgpu_hosts.values():
        for live in host.live:
            mdev.remove(kernel, live, Proof(ProofKind.FORCED, [live.id]))
    return took_s


def main() -> None:
    """Boot a guest, apply vGPU configs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flavour", nargs="?", default="groups", choices=[flavour.value for flavour in Flavour])
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median counts")
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, booted(prepare(Flavour(arguments.flavour))) as guest:
        change_host = ChangeHost(
            guest.kernel, NO_TOOLS, Path(folder) / "drivers.json", Path(folder) / "locks", Path(folder)
        )
        for _ in range(arguments.rounds):
            rows.setdefault("32 made by the back end alone", []).append(writes_s(guest.kernel))
            rows.setdefault("32 made on two empty GPUs", []).append(vgpu_change_s(change_host, {"T4-1B": EACH}))
            rows.setdefault("32 removed, 16 larger ones made", []).append(
                vgpu_change_s(change_host, {"T4-2B": EACH // 2})
            )
            vgpu_change_s(change_host, {})
    print(f"| {arguments.flavour} | s |\n|---|---|")
    for what, times in rows.items():
        print(f"| {what} | {statistics.median(times):.2f} |")


if __name__ == "__main__":
    main()
