"""A simulated host on which a test creates vGPUs."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from gpuvirt.agent.change.observation import observe
from gpuvirt.facts.ids import IommuGroup, PciAddress, VgpuId
from gpuvirt.facts.vgpu import GpuModes
from gpuvirt.hardware.programs import nvidiasmi
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.plan import VgpuPlan
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import SimKernel
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_host_in, change_vgpus, plan_vgpus


class VgpuHost:
    """Changes the vGPUs of a host."""

    def __init__(self, simulated: str, folder: Path) -> None:
        self.kernel: SimKernel = build_host(load_host(simulated))
        self.tools = SimTools(self.kernel)
        self.change_host = change_host_in(folder, self.kernel, self.tools)
        self.given = NOBODY
        self.steps: list[str] = []

    def apply_vgpus(self, gpu: PciAddress, **desired_counts: int) -> tuple[Reason, ...]:
        return self.apply_types(gpu, {name.replace("_", "-"): count for name, count in desired_counts.items()})

    def apply_types(self, gpu: PciAddress, desired_counts: Mapping[str, int]) -> tuple[Reason, ...]:
        self.steps.clear()
        return change_vgpus(
            self.change_host, gpu, DesiredVgpus(desired_counts), self.given, lambda step: self.steps.append(step.text)
        )

    def carries(self, gpu: PciAddress) -> Counter[str]:
        return Counter(self.types(gpu).values())

    def types(self, gpu: PciAddress) -> dict[VgpuId, str]:
        host = scan(self.kernel).vgpu_hosts[gpu]
        return {vgpu.id: str(vgpu.type).rpartition(" ")[2] for vgpu in host.live}

    def group_of(self, vgpu: VgpuId) -> IommuGroup:
        return self.kernel.mdev.devices[vgpu].group

    def desired_vgpus(self, gpu: PciAddress, desired_vgpus: DesiredVgpus) -> tuple[Reason, ...]:
        self.steps.clear()
        return change_vgpus(self.change_host, gpu, desired_vgpus, self.given, lambda step: self.steps.append(step.text))

    def planned(self, gpu: PciAddress, desired_vgpus: DesiredVgpus) -> VgpuPlan:
        return plan_vgpus(observe(self.change_host, self.given, None), gpu, desired_vgpus)

    def modes(self, gpu: PciAddress) -> GpuModes:
        return nvidiasmi.read_modes(self.tools, gpu)

    def asked(self) -> list[tuple[str, ...]]:
        """The arguments of all nvidia-smi calls."""
        return [command[1:] for command in self.tools.commands if command[0] == "nvidia-smi"]


def codes(reasons: tuple[Reason, ...]) -> list[ReasonCode]:
    return [reason.code for reason in reasons]
