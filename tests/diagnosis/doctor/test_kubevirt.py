"""Doctor's checks of KubeVirt: permitted devices, their provider, and the creator of mediated devices."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.diagnosis import diagnosis
from gpuvirt.diagnosis.evidence import IOMMUFD_RESOURCE, ClusterNode
from gpuvirt.diagnosis.findings import Finding, Report
from gpuvirt.diagnosis.vms.vmevidence import cluster_node
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.model.kubevirt.kubevirt import GRACE_GATES, parse
from gpuvirt.model.reasons import FindingCode, ReasonCode
from gpuvirt.model.reasons.codes import Level
from tests.diagnosis.doctor.sickhost import NOWHERE, codes, evidence, findings, found, host

EXAMPLE = (Path(__file__).parents[3] / "examples/kubevirt.yaml").read_text()

TEMPLATE = """
apiVersion: v1
kind: List
items:
- apiVersion: kubevirt.io/v1
  kind: KubeVirt
  metadata: {{name: kubevirt, namespace: kubevirt, managedFields: [{{"f:spec": {{".": {{}}}}}}]}}
  spec:
    imagePullPolicy: IfNotPresent
    configuration: {configuration}
  status: {{observedKubeVirtVersion: {version}, conditions: []}}
"""

PERMITTED = "{{permittedHostDevices: {{pciHostDevices: [{{pciVendorSelector: '{0}', resourceName: {1}, {2}}}]}}}}"
OURS = "externalResourceProvider: true"
A10 = "nvidia.com/GA102GL_A10"


def report(
    configuration: str,
    simulated: str = "2xA10",
    version: str = "v1.9.0",
    nodes: tuple[ClusterNode, ...] | None = None,
) -> Report:
    kubevirts = parse(TEMPLATE.format(configuration=configuration, version=version), where="test")
    return diagnosis.report(replace(evidence(host(simulated=simulated), NOWHERE, kubevirts), cluster_nodes=nodes))


def of_kubevirt(reported: Report) -> Sequence[Finding]:
    return [finding for result in reported.results if result.area == "kubevirt" for finding in result.findings]


def test_the_example_permits_the_offered_resources() -> None:
    reported = diagnosis.report(evidence(host(), NOWHERE, parse(EXAMPLE, where="example")))
    assert reported.level is Level.OK
    assert [finding.subject for finding in of_kubevirt(reported)] == [A10]


def test_without_a_list_all_devices_are_permitted() -> None:
    (one,) = of_kubevirt(report("{}"))
    assert (one.level, one.message) == (Level.OK, "permits all devices")


def test_a_cluster_without_kubevirt_has_no_findings() -> None:
    assert of_kubevirt(diagnosis.report(evidence(host()))) == []


def test_missing_and_misspelt_permitted_devices_are_reported() -> None:
    reported = report(PERMITTED.format("10de:2236", "nvidia.com/GA102_A10", OURS))
    one = found(reported, FindingCode.NOT_PERMITTED)
    assert (one.level, one.subject) == (Level.ERROR, A10)
    assert "it permits the similar name nvidia.com/GA102_A10" in one.message
    assert one.fix[1:] == ('- pciVendorSelector: "10DE:2236"', f"  resourceName: {A10}", f"  {OURS}")
    assert len(of_kubevirt(reported)) == 1, "reported once"


def test_a_misspelt_resource_name_gets_a_suggestion() -> None:
    lists = f"""{{permittedHostDevices: {{pciHostDevices: [
      {{pciVendorSelector: '10de:2236', resourceName: {A10}, {OURS}}},
      {{pciVendorSelector: '10de:2236', resourceName: nvidia.com/A10, {OURS}}},
      {{pciVendorSelector: '10de:1eb8', resourceName: nvidia.com/TU104GL_TESLA_T4, {OURS}}}]}}}}"""
    one = found(report(lists), FindingCode.PERMITTED_NAME_UNKNOWN)
    assert (one.level, one.subject) == (Level.WARNING, "nvidia.com/A10")
    assert f"did you mean {A10}?" in one.message
    assert "pciHostDevices[1]" in one.seen[0].path


@pytest.mark.parametrize("provider", ["externalResourceProvider: false", "x: 1"])
def test_a_resource_that_kubevirt_provides_is_reported(provider: str) -> None:
    one = found(report(PERMITTED.format("10de:2236", A10, provider)), FindingCode.NOT_EXTERNAL)
    assert (one.level, one.fix[-1]) == (Level.ERROR, OURS)


@pytest.mark.parametrize(("selector", "fits"), [("10DE:2236", True), ("10de:2236", True), ("10de:2237", False)])
def test_selectors_are_compared(selector: str, fits: bool) -> None:
    reported = report(PERMITTED.format(selector, A10, OURS))
    assert (FindingCode.SELECTOR_MISMATCH in codes(reported)) is not fits


MDEVS = """{permittedHostDevices: {mediatedDevices: [
  {mdevNameSelector: GRID T4-8Q, resourceName: nvidia.com/GRID_T4-8Q, externalResourceProvider: true},
  {mdevNameSelector: GRID_T4-1Q, resourceName: nvidia.com/GRID_T4-1Q, externalResourceProvider: %s}]}%s}"""
GATED = ", developerConfiguration: {featureGates: [DisableMDEVConfiguration]}"


@pytest.mark.parametrize(
    ("external", "more", "code"),
    [
        ("true", "", None),
        ("false", "", FindingCode.MDEVS_NOT_OURS),
        ("false", ", mediatedDevicesConfiguration: {enabled: true}", FindingCode.MDEVS_NOT_OURS),
        ("false", ", mediatedDevicesConfiguration: {enabled: false}", None),
        ("false", GATED, None),
        ("false", f"{GATED}, mediatedDevicesConfiguration: {{enabled: true}}", FindingCode.MDEVS_NOT_OURS),
    ],
)
def test_mdevs_that_kubevirt_would_delete_are_reported(external: str, more: str, code: FindingCode | None) -> None:
    reported = report(MDEVS % (external, more), "4xT4")
    assert (FindingCode.MDEVS_NOT_OURS in codes(reported)) is (code is not None)
    assert FindingCode.SELECTOR_MISMATCH not in codes(reported), "a space and _ are equivalent"
    if code is not None:
        assert '{"mediatedDevicesConfiguration":{"enabled":false}}' in found(reported, code).fix[1]


GH200 = "nvidia.com/GH100_GH200_120GB_SLASH_480GB"
GRACE_LIST = (
    f"permittedHostDevices: {{pciHostDevices: [{{pciVendorSelector: '10DE:2342', resourceName: {GH200}, {OURS}}}]}}"
)
NODES = (
    ClusterNode("old", "5.15.0-91-generic"),
    ClusterNode("without", "6.8.0", iommufd=False),
    ClusterNode("new", "6.8.0-31-generic"),
    ClusterNode("odd", ""),
)


def gates(*names: str, more: str = "") -> str:
    return f"{{developerConfiguration: {{featureGates: [{', '.join(names)}]}}{more}}}"


def test_missing_feature_gates_are_reported() -> None:
    reported = report(gates("IOMMUFD", more=f", {GRACE_LIST}"), "2xGH200")
    one = found(reported, FindingCode.FEATURE_GATE_MISSING)
    assert (one.level, one.message.endswith("GraceIOVirtualization, PCINUMAAwareTopology")) == (Level.ERROR, True)
    assert not any("iommufd" in line for line in one.fix), "that gate is on"
    reported = report(gates(*GRACE_GATES, more=f", {GRACE_LIST}"), "2xGH200")
    assert FindingCode.FEATURE_GATE_MISSING not in codes(reported)
    assert any("v1.9.0 has the gates" in finding.message for finding in findings(reported))


@pytest.mark.parametrize(("enabled", "missing"), [(GRACE_GATES, False), (GRACE_GATES[1:], True)])
def test_a_gate_that_is_enabled_and_disabled_is_on(enabled: tuple[str, ...], missing: bool) -> None:
    """KubeVirt looks into `featureGates` first."""
    both = f"featureGates: [{', '.join(enabled)}], disabledFeatureGates: [{GRACE_GATES[0]}]"
    reported = report(f"{{developerConfiguration: {{{both}}}, {GRACE_LIST}}}", "2xGH200")
    assert (FindingCode.FEATURE_GATE_MISSING in codes(reported)) is missing


def test_without_a_list_kubevirt_admits_vms_with_grace_gpus() -> None:
    one = found(report("{}", "2xGH200"), FindingCode.FEATURE_GATE_MISSING)
    assert one.level is Level.WARNING
    assert "permittedHostDevices" in (one.why or "")


@pytest.mark.parametrize("version", ["v1.8.4", "v1.7.0"])
def test_older_versions_have_no_gates_for_grace_gpus(version: str) -> None:
    reported = report(f"{{{GRACE_LIST}}}", "2xGH200", version)
    assert FindingCode.FEATURE_GATE_MISSING not in codes(reported)


def test_the_fix_names_the_nodes_that_the_gate_iommufd_would_keep_from_running_vms() -> None:
    fix = "\n".join(found(report(f"{{{GRACE_LIST}}}", "2xGH200", nodes=NODES), FindingCode.FEATURE_GATE_MISSING).fix)
    assert "- IOMMUFD" in fix
    assert "devices.kubevirt.io/iommufd" in fix
    assert "old (Linux 5.15.0-91-generic)" in fix
    assert "without" in fix
    assert "new" not in fix.replace("new:", "")
    assert "libvirt 12.2" in fix
    unknown = "\n".join(found(report(f"{{{GRACE_LIST}}}", "2xGH200"), FindingCode.FEATURE_GATE_MISSING).fix)
    assert "--kubeconfig" in unknown, "the nodes are not known"


@pytest.mark.parametrize(
    ("count", "offers"), [({}, None), ({IOMMUFD_RESOURCE: "0"}, False), ({IOMMUFD_RESOURCE: "1k"}, True)]
)
def test_a_node_reports_its_kernel_and_whether_it_has_iommufd(count: dict[str, str], offers: bool | None) -> None:
    status = {"allocatable": {"cpu": "4", **count}, "nodeInfo": {"kernelVersion": "5.15.0"}}
    node = msgspec.convert({"metadata": {"name": "a"}, "status": status}, Node)
    assert cluster_node(node) == ClusterNode("a", "5.15.0", offers)


def test_a_host_without_iommufd_runs_no_vm_once_the_gate_is_on() -> None:
    one = found(report(gates("IOMMUFD"), nodes=NODES), FindingCode.IOMMUFD_MISSING)
    assert (one.level, one.subject) == (Level.ERROR, "this host")
    assert any(seen.path == "/dev/iommu" for seen in one.seen)
    others = found(report(gates("IOMMUFD"), "2xGH200", nodes=NODES), FindingCode.IOMMUFD_MISSING)
    assert (others.level, others.subject) == (Level.ERROR, "without")
    for reported in (
        report(gates("IOMMUFD"), "2xGH200", nodes=()),
        report("{}"),
        report(gates("IOMMUFD"), version="v1.8.4"),
    ):
        assert FindingCode.IOMMUFD_MISSING not in codes(reported)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"lacks the key kind"),
        ("kind: VirtualMachine\n", r"f: \$\.kind: is a VirtualMachine; expected KubeVirt"),
        ("kind: List\nitems: [{kind: Pod}]", r"is a Pod; expected KubeVirt"),
        ("kind: KubeVirt\nspec: {configuration: {permittedHostDevices: [1]}}", r"\$\.spec\.configuration"),
        ("[", r"not YAML"),
    ],
)
def test_a_file_that_is_no_kubevirt_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, where="f")


@pytest.mark.parametrize("also", ["", f", {{pciVendorSelector: '10DE:2236', resourceName: {A10}, {OURS}}}"])
@pytest.mark.parametrize("name", ["example.com/mine", "nvidia.com/GA102_A10"])
def test_kubevirts_own_provider_of_the_same_devices_is_found_by_the_devices(name: str, also: str) -> None:
    """KubeVirt lets the last entry of a selector win, so an entry of gpuvirt's would not replace its plugin."""
    entry = f"{{pciVendorSelector: '10de:2236', resourceName: {name}}}{also}"
    reported = report(f"{{permittedHostDevices: {{pciHostDevices: [{entry}]}}}}")
    (one,) = of_kubevirt(reported)
    assert (one.code, one.level, one.subject) == (ReasonCode.FOREIGN_PROVIDER, Level.ERROR, A10)
    assert f"as {name}" in one.message
    assert "pciHostDevices[0]" in one.seen[0].path
    assert not [line for line in one.fix if "pciVendorSelector" in line]
