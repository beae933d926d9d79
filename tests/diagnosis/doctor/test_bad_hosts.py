"""Each fault of a host is found and reported with its path and its fix."""

from pathlib import Path

import pytest

from gpuvirt.diagnosis.diagnosis import CHECKS
from gpuvirt.diagnosis.findings import GRAVITY, Finding, Report, of_reason
from gpuvirt.facts.ids import PciAddress
from gpuvirt.hardware.scan import scan
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import CdiUse, Enforcement, Settings, ShareSettings
from gpuvirt.model.reasons import FindingCode, Link, Reason, ReasonCode, Seen
from gpuvirt.model.reasons.codes import Level
from gpuvirt_sim.devices.platform import PlatformSpec
from gpuvirt_sim.hostspec import host_names
from tests.diagnosis.doctor.badhosts import BAD, with_file
from tests.diagnosis.doctor.sickhost import codes, evidence, examine, findings, found, host, simulated

SHARED = Settings(mode=DesiredMode.SHARED)


def check(report: Report, code: FindingCode | ReasonCode, level: Level, seen: str, fix: str) -> Finding:
    one = found(report, code)
    assert one.level is level
    assert GRAVITY.index(code.level) >= GRAVITY.index(level), "docs/reference has the gravest level of a code"
    assert seen in "\n".join(f"{thing.path}: {thing.value}" for thing in one.seen)
    assert fix in "\n".join(one.fix)
    assert report.level in {level, Level.ERROR}
    return one


@pytest.mark.parametrize("name", BAD)
def test_each_fault_of_a_host_is_found_with_its_path_and_fix(name: str) -> None:
    bad = BAD[name]
    kernel = bad.build()
    check(examine(kernel), bad.code, bad.level, bad.seen, bad.fix)
    assert kernel.writes == []


@pytest.mark.parametrize("name", ["2xA10", "4xRTX2060", "2xGH200", "8xMI300X"])
def test_a_healthy_host_has_no_findings(name: str) -> None:
    report = examine(host(simulated=name))
    assert (report.level, codes(report)) == (Level.OK, {ReasonCode.KIND_NOT_OFFERED} & codes(report))


def test_an_empty_gpu_in_mode_on_demand_is_idle_and_not_without_vgpus() -> None:
    report = examine(host(simulated="2xA10-sriov"), settings=Settings(modes={"0000:65:00.0": DesiredMode.ON_DEMAND}))
    lacking = [finding for finding in findings(report) if finding.code is ReasonCode.NO_VGPUS]
    assert [finding.subject for finding in lacking] == ["0000:ca:00.0"], "it has no desired mode"
    assert "0000:65:00.0 is empty: in mode on-demand a vGPU is created when a pod starts" in [
        f"{finding.subject} {finding.message}" for finding in findings(report) if finding.level is Level.OK
    ]


@pytest.mark.parametrize("name", host_names())
def test_every_simulated_host_gets_a_complete_report(name: str) -> None:
    report = examine(host(simulated=name), settings=SHARED if name.startswith("vm-") else None)
    assert [finding for finding in findings(report) if finding.level is Level.UNKNOWN] == []
    assert (report.level is Level.ERROR) == (name == "2xA10-no-iommu")


@pytest.mark.parametrize("mode", [DesiredMode.CONTAINER, DesiredMode.SHARED])
@pytest.mark.parametrize("name", ["vm-V100-8Q", "vm-2xV100", "2xA10-no-iommu"])
def test_gpus_for_containers_need_no_iommu(name: str, mode: DesiredMode) -> None:
    kernel = host(simulated=name)
    report = examine(kernel, settings=Settings(mode=mode))
    found = codes(report)
    assert not found & {FindingCode.IOMMU_OFF, FindingCode.HOST_IS_VM, FindingCode.KVM_MISSING}
    assert [finding.message for finding in findings(report) if finding.subject == "the IOMMU"] == [
        "is not needed: all GPUs are for containers"
    ]
    one_for_a_vm = Settings(mode=mode, modes={next(iter(scan(kernel).functions)): DesiredMode.PASSTHROUGH})
    if name != "2xA10-no-iommu":
        assert FindingCode.IOMMU_OFF in codes(examine(kernel, settings=one_for_a_vm))


CDI = Settings(cdi=CdiUse.ANSWERS)
CONTAINERD = "/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("path", "text", "code", "fix"),
    [
        (CONTAINERD, "version = 2\n", FindingCode.CDI_OFF, "enable_cdi = true"),
        (
            CONTAINERD,
            'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n',
            FindingCode.CDI_OFF,
            '[plugins."io.containerd.cri.v1.runtime"]',
        ),
        (CONTAINERD, "version = 3\n", None, ""),
        (
            CONTAINERD,
            'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\ncdi_spec_dirs = ["/etc/cdi"]\n',
            FindingCode.CDI_FOLDER_NOT_READ,
            '"/run/cdi"',
        ),
        ("/etc/crio/crio.conf", "[crio.runtime]\n", None, ""),
        (
            "/etc/crio/crio.conf.d/10-cdi.conf",
            '[crio.runtime]\ncdi_spec_dirs = ["/opt/cdi"]\n',
            FindingCode.CDI_FOLDER_NOT_READ,
            "10-cdi.conf",
        ),
        (CONTAINERD, "version = = 2", FindingCode.NOT_READ, "root"),
        (CONTAINERD, "plugins = 3", FindingCode.CDI_OFF, ""),
    ],
)
def test_runtimes(path: str, text: str, code: FindingCode | None, fix: str) -> None:
    kernel = host(with_file(path, text))
    report = examine(kernel, settings=CDI)
    assert codes(report) == ({code} if code is not None else set())
    if code is not None:
        assert fix in "\n".join(found(report, code).fix)
    assert codes(examine(kernel)) <= {FindingCode.NOT_READ}, "only CDI answers need the runtime's CDI support"


def test_a_configuration_of_version_2_says_nothing_of_cdi_since_containerd_2_reads_it_too() -> None:
    off = found(examine(host(with_file(CONTAINERD, "version = 2\n")), settings=CDI), FindingCode.CDI_OFF)
    assert off.level is Level.WARNING
    assert "off if it is older than 2.0" in off.message
    text = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = false\n'
    assert found(examine(host(with_file(CONTAINERD, text)), settings=CDI), FindingCode.CDI_OFF).level is Level.ERROR


def test_gpus_in_mode_shared_need_the_runtimes_cdi() -> None:
    kernel = host(with_file(CONTAINERD, "version = 2\n"))
    off = found(examine(kernel, settings=SHARED), FindingCode.CDI_OFF)
    assert off.why is not None
    assert "GPUs in mode shared" in off.why
    assert "or set mode container for these GPUs" in off.fix
    without = Settings(mode=DesiredMode.SHARED, cdi=CdiUse.NONE)
    assert FindingCode.CDI_OFF in codes(examine(kernel, settings=without))
    assert FindingCode.CDI_OFF not in codes(examine(kernel, settings=Settings(mode=DesiredMode.CONTAINER)))
    on = host(with_file(CONTAINERD, "version = 3\n"))
    assert FindingCode.CDI_OFF not in codes(examine(on, settings=SHARED))


@pytest.mark.parametrize(
    ("version", "shares", "level", "text"),
    [
        ("615.71.09", ShareSettings(enforcement=Enforcement.DRIVER), Level.OK, "are limited by driver"),
        (
            "580.159.04",
            ShareSettings(enforcement=Enforcement.DRIVER),
            Level.ERROR,
            "can't be limited by NVIDIA's driver",
        ),
        (
            "580.159.04",
            ShareSettings(enforcement=Enforcement.DRIVER_MPS, otherwise=Enforcement.MPS),
            Level.OK,
            "are limited by mps",
        ),
        ("580.159.04", ShareSettings(enforcement=Enforcement.MPS), None, ""),
    ],
)
def test_a_driver_limits_shares_or_doctor_says_why_not(
    version: str, shares: ShareSettings, level: Level | None, text: str
) -> None:
    kernel = host(PlatformSpec(nvidia_version=version, modules=("nvidia", "vfio_pci")))
    report = examine(kernel, settings=Settings(mode=DesiredMode.SHARED, shares=shares))
    limits = next(result.findings for result in report.results if result.check == "share_limits")
    assert [finding.level for finding in limits] == ([level] if level is not None else [])
    assert all(finding.message.startswith(text) for finding in limits)


def test_every_check_has_a_host_with_a_finding() -> None:
    """Faults of the kubelet, of Kata and of KubeVirt are in files of their own."""
    reported = {
        result.check
        for bad in BAD.values()
        for result in examine(bad.build()).results
        if any(finding.level is not Level.OK for finding in result.findings)
    }
    reported |= {"share_limits", "container_cdi", "listening", "registration", "exclusion", "counted", "policies"}
    reported |= {"kata_cdi_specs", "kata_settings", "kata_handler", "kata_devices", "kata_nodes"}
    reported |= {"permitted_names", "near_misses", "mediated_devices", "feature_gates", "iommufd"}
    assert {check.name for check in CHECKS} == reported
    tested = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    bad_hosts = {bad.code for bad in BAD.values()}
    assert [code for code in FindingCode if f"FindingCode.{code.name}" not in tested and code not in bad_hosts] == []


def test_a_host_that_is_a_vm_with_a_virtual_iommu_is_healthy() -> None:
    assert examine(host(PlatformSpec(hypervisor=True))).level is Level.OK


def test_bus_reset_suffices_while_all_functions_of_the_bus_are_on_vfio() -> None:
    first, audio = "0000:04:00.0", PciAddress("0000:04:00.1")
    slots = "{at: '0000:00:01.0', board: pcie-pci-bridge, group: 1},"
    slots += f"{{at: '{first}', board: RTX2060, driver: vfio-pci, group: 2, behind: '0000:00:01.0'}}"
    kernel = simulated(f"{{about: x, platform: {{without_reset: ['{first}']}}, slots: [{slots}]}}")
    assert ReasonCode.NO_RESET not in codes(examine(kernel))
    kernel.rebind(audio, "snd_hda_intel")
    assert found(examine(kernel), ReasonCode.NO_RESET).subject == first


def test_an_iommu_group_used_by_the_host_is_reported_once() -> None:
    assert FindingCode.SHARED_GROUP not in codes(examine(BAD["a disk in the group"].build()))


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (Link("/sys/x/driver", "nvidia"), "/sys/x/driver -> nvidia"),
        (Seen.absent("/dev/vfio/12"), "no /dev/vfio/12"),
        (Seen("/sys/x/config", "begins ffff"), "/sys/x/config: begins ffff"),
        (Seen("/sys/x/virtfn0"), "/sys/x/virtfn0"),
        (Seen("", "no answer"), "no answer"),
    ],
)
def test_a_finding_shows_the_evidence_of_its_reason(seen: Seen, text: str) -> None:
    reason = Reason(ReasonCode.UNREAD, "x", "y", (seen, seen))
    assert of_reason(reason, Level.OK).seen == (seen, seen)
    assert reason.text == f"Unread: x y; seen: {text}, {text}"


def test_doctor_reports_the_reasons_of_gpuvirt_devices() -> None:
    """A reason of `gpuvirt devices` is a finding with the same code, unless it concerns the whole host."""
    for bad in BAD.values():
        kernel = bad.build()
        report = examine(kernel)
        shown = {finding.code for finding in findings(report)}
        from_view = {reason.code for gpu in evidence(kernel).view.gpus for reason in gpu.reasons}
        assert from_view <= shown | {ReasonCode.NO_IOMMU_GROUP}
        assert (ReasonCode.NO_IOMMU_GROUP in from_view) <= (FindingCode.IOMMU_OFF in shown)
