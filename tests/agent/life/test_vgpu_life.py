"""vGPUs change while VMs and pods come and go, and changes are killed: no VM ever gets a VFIO request for a vGPU."""

import errno
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from typing_extensions import override

from gpuvirt.agent.change.changehost import Inputs
from gpuvirt.facts.ids import PciAddress, VgpuId, VgpuType
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.steps import RollBack, Step
from gpuvirt.model.change.vgpus.gpustate import Holding
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.vgputypes.profiles import profile_name
from gpuvirt.paths import HostPath
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import change_host_in, change_vgpus, inputs
from tests.thoroughness import examples

pytestmark = pytest.mark.timeout(600, func_only=True)  # many examples on a busy host

SIZES = ((), ("4Q",), ("8Q",), ("1Q",))
HOSTS = {
    "4xT4": ("T4", SIZES),
    "2xA10-vgpu": ("A10", (*SIZES, ("12Q", "4Q"), ("8Q", "4Q", "2Q"))),
    "4xL40S": ("L40S", SIZES),
    "2xA30": ("A30", ((), ("12C",), ("4C",), ("1-6C",), ("2-12C", "1-6C"), ("4-24C",))),
}
"""By the card, with the sizes of which some are wished at a time; several are mixed, or on GPU instances."""
NUMBERS = st.integers(0, 40)


class Killed(Exception):  # noqa: N818
    """The process was killed."""


class VgpuLife(RuleBasedStateMachine):
    """A host whose vGPUs change."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.kernel: SimKernel
        self.vms: list[tuple[Process, VgpuId]] = []
        self.pods: dict[VgpuId, Holding] = {}

    @override
    def teardown(self) -> None:
        self.folder.cleanup()

    @initialize(host=st.sampled_from(sorted(HOSTS)))
    def build(self, host: str) -> None:
        spec = load_host(host)
        slots = [
            replace(slot, vfs=min(slot.vfs, 6)) for slot in spec.slots
        ]  # more GPUs take longer and show nothing new
        self.kernel = build_host(replace(spec, slots=tuple(slots)))
        self.card, self.sizes = HOSTS[host]
        folder = Path(self.folder.name)
        self.tools = SimTools(self.kernel)
        self.change_host = change_host_in(folder, self.kernel, self.tools)
        self.gpus = sorted(scan(self.kernel).vgpu_hosts)

    @property
    def given(self) -> Inputs:
        return inputs(holdings=tuple(self.pods.values()))

    def live(self) -> list[tuple[VgpuId, str, PciAddress]]:
        hosts = scan(self.kernel).vgpu_hosts.values()
        return [(vgpu.id, str(vgpu.type), host.gpu) for host in hosts for vgpu in host.live]

    def desired_vgpus(self, size: int, number: int) -> DesiredVgpus:
        """Return one or two vGPUs of a size, or one of each size; on an A10 sometimes with a desired size mode.

        For a GPU without vGPUs, sometimes passthrough is desired.
        """
        sizes = self.sizes[size % len(self.sizes)]
        if not sizes and number % 2:
            return DesiredVgpus(whole=True)
        desired_counts = {f"{self.card}-{size}": 1 if sizes[1:] else 1 + number % 2 for size in sizes}
        if self.card != "A10" or number % 3 == 0:
            return DesiredVgpus(desired_counts)
        return DesiredVgpus(desired_counts, Sizes.MIXED if sizes[1:] or number % 3 == 1 else Sizes.EQUAL)

    @rule(number=NUMBERS, size=NUMBERS)
    def apply_vgpus(self, number: int, size: int) -> None:
        gpu, desired_vgpus = self.gpus[number % len(self.gpus)], self.desired_vgpus(size, number)
        taken: list[str] = []
        reasons = change_vgpus(self.change_host, gpu, desired_vgpus, self.given, lambda step: taken.append(step.text))
        if not reasons:
            assert (
                Counter(profile_name(vgpu_type) for _, vgpu_type, on in self.live() if on == gpu) == desired_vgpus.types
            )
            assert not (desired_vgpus.whole and self.kernel.pci.functions[gpu].virtfns)
        failed = ReasonCode.STEP_FAILED in {reason.code for reason in reasons}
        # Beside a vGPU in use, whose placement is unknown, mixed sizes may be refused although they would fit.
        assert not failed or (self.card == "A10" and (self.vms or self.pods))
        if failed:
            return
        taken.clear()
        change_vgpus(self.change_host, gpu, desired_vgpus, self.given, lambda step: taken.append(step.text))
        assert taken == [], "applying the same vGPUs again has no steps"

    @rule(number=NUMBERS, size=NUMBERS, after=st.integers(0, 5))
    def crash(self, number: int, size: int, after: int) -> None:
        """Change the vGPUs of a GPU, and kill the process between two steps."""
        taken: list[str] = []

        def report(step: Step | RollBack) -> None:
            taken.append(step.text)
            if len(taken) > after:
                raise Killed

        with suppress(Killed):
            change_vgpus(
                self.change_host,
                self.gpus[number % len(self.gpus)],
                self.desired_vgpus(size, number),
                self.given,
                report,
            )

    @rule(number=NUMBERS, size=NUMBERS, after=st.integers(1, 9))
    def fail(self, number: int, size: int, after: int) -> None:
        """Change the vGPUs of a GPU and let one call of nvidia-smi fail: the previous vGPUs exist afterwards."""
        gpu, desired_vgpus = self.gpus[number % len(self.gpus)], self.desired_vgpus(size, number)
        left = iter(range(after))

        def happen(command: Sequence[str]) -> None:
            if next(left, None) is None and "-q" not in command:
                self.tools.before = lambda _: None
                raise OSError(errno.EIO, "Input/output error", command[0])

        before = [vgpu for vgpu in self.live() if vgpu[2] == gpu]
        self.tools.before = happen
        reasons = change_vgpus(self.change_host, gpu, desired_vgpus, self.given, lambda _: None)
        self.tools.before = lambda _: None
        if ReasonCode.STEP_FAILED in {reason.code for reason in reasons}:
            assert sorted(before) == sorted(vgpu for vgpu in self.live() if vgpu[2] == gpu)

    @rule(number=NUMBERS)
    def start_vm(self, number: int) -> None:
        """Start a VM on a free vGPU; without a pod, like a VM that a user runs by hand."""
        had = {vgpu for _, vgpu in self.vms}
        free = [vgpu for vgpu, _, _ in self.live() if vgpu not in had]
        if free:
            vgpu = free[number % len(free)]
            group = next(number for number, group in self.kernel.vfio.groups.items() if vgpu in group.vfio_devices)
            self.vms.append((self.kernel.start_vm(group), vgpu))

    @rule(number=NUMBERS)
    def end_vm(self, number: int) -> None:
        if self.vms:
            self.kernel.end_vm(self.vms.pop(number % len(self.vms))[0])

    @rule(number=NUMBERS)
    def admit_pod(self, number: int) -> None:
        """A pod gets a vGPU, and its VM has not started."""
        if live := self.live():
            vgpu, vgpu_type, gpu = live[number % len(live)]
            self.pods[vgpu] = Holding(gpu, vgpu, VgpuType(vgpu_type), "pod default/vm", seen_this_boot=True)

    @rule(number=NUMBERS)
    def end_pod(self, number: int) -> None:
        if self.pods:
            del self.pods[sorted(self.pods)[number % len(self.pods)]]

    @rule(number=NUMBERS)
    def an_admin_removes(self, number: int) -> None:
        """Another program removes a free vGPU."""
        had = {*self.pods, *(vgpu for _, vgpu in self.vms)}
        free = [vgpu for vgpu, _, _ in self.live() if vgpu not in had]
        if free:
            vgpu = free[number % len(free)]
            if ":" in vgpu:
                self.kernel.write(HostPath(f"/sys/bus/pci/devices/{vgpu}/nvidia/current_vgpu_type"), b"0")
            else:
                self.kernel.write(HostPath(f"/sys/bus/mdev/devices/{vgpu}/remove"), b"1")

    @invariant()
    def vgpus_in_use_exist(self) -> None:
        if hasattr(self, "change_host"):
            assert self.kernel.vfio.requests == []
            existing = {vgpu for vgpu, _, _ in self.live()}
            assert existing >= {*self.pods, *(vgpu for _, vgpu in self.vms)}


TestVgpuLife = VgpuLife.TestCase
TestVgpuLife.settings = settings(max_examples=examples(30), stateful_step_count=20, deadline=None)
