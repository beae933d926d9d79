"""Hosts with a fault, and doctor's report on them."""

from pathlib import Path

import msgspec

from gpuvirt import documents
from gpuvirt.cli.evidence import EvidenceSources, diagnose, gather
from gpuvirt.diagnosis.evidence import Evidence
from gpuvirt.diagnosis.findings import Finding, Report
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.kubevirt.kubevirt import KubeVirt
from gpuvirt.model.reasons.codes import Code
from gpuvirt.paths import KubeletPaths
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.clock import SimClock
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import HostSpec, load_host
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import IDS

NOWHERE = Path("/nonexistent")


def host(platform: PlatformSpec | None = None, simulated: str = "2xA10", driver: str | None = None) -> SimKernel:
    """Return a simulated host on another platform; `driver` replaces the GPUs' own driver."""
    spec = load_host(simulated)
    if driver is not None:
        gpus = [slot if slot.board in NO_GPUS else msgspec.structs.replace(slot, driver=driver) for slot in spec.slots]
        spec = msgspec.structs.replace(spec, slots=tuple(gpus))
    if platform is not None:
        spec = msgspec.structs.replace(spec, platform=platform)
    return build_host(spec)


NO_GPUS = {"root-port", "pcie-pci-bridge", "bmc-display", "network", "nvme"}


def simulated(text: str) -> SimKernel:
    """Return the simulated host of a YAML text."""
    return build_host(documents.parse(text, HostSpec, where="test"))


def around(
    kubelet: Path = NOWHERE, settings: Settings | None = None, kubevirts: tuple[KubeVirt, ...] | None = None
) -> EvidenceSources:
    return EvidenceSources(
        kubelet=KubeletPaths(kubelet),
        settings=settings or Settings(),
        ids=IDS,
        clock=SimClock(),
        kubevirts=kubevirts,
    )


def examine(kernel: SimKernel, kubelet: Path = NOWHERE, settings: Settings | None = None) -> Report:
    return diagnose(kernel, around(kubelet, settings))


def evidence(kernel: SimKernel, kubelet: Path = NOWHERE, kubevirts: tuple[KubeVirt, ...] | None = None) -> Evidence:
    return gather(kernel, around(kubelet, None, kubevirts))


def findings(report: Report) -> list[Finding]:
    return [finding for result in report.results for finding in result.findings]


def codes(report: Report) -> set[Code]:
    return {finding.code for finding in findings(report) if finding.code is not None}


def found(report: Report, code: Code) -> Finding:
    """Return the first finding with a code."""
    return next(finding for finding in findings(report) if finding.code is code)
