"""Doctor's checks of KubeVirt: permitted devices, their provider, and the creator of mediated devices."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuvirt.errors import ConfigError
from gpuvirt.model.doctor import diagnosis
from gpuvirt.model.doctor.findings import Finding, Report
from gpuvirt.model.doctor.kubevirt import parse
from gpuvirt.model.reasons import FindingCode
from gpuvirt.model.reasons.codes import Level
from tests.sickhost import NOWHERE, codes, evidence, findings, found, host

EXAMPLE = (Path(__file__).parent.parent.parent / "examples/kubevirt.yaml").read_text()

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
  status: {{observedKubeVirtVersion: v1.8.0, conditions: []}}
"""

PERMITTED = "{{permittedHostDevices: {{pciHostDevices: [{{pciVendorSelector: '{0}', resourceName: {1}, {2}}}]}}}}"
OURS = "externalResourceProvider: true"
A10 = "nvidia.com/GA102GL_A10"


def report(configuration: str, simulated: str = "2xA10") -> Report:
    kubevirts = parse(TEMPLATE.format(configuration=configuration), where="test")
    return diagnosis.report(evidence(host(simulated=simulated), NOWHERE, kubevirts))


def of_kubevirt(reported: Report) -> Sequence[Finding]:
    return [one for result in reported.results if result.area == "kubevirt" for one in result.findings]


def test_the_example_permits_the_offered_resources() -> None:
    reported = diagnosis.report(evidence(host(), NOWHERE, parse(EXAMPLE, where="example")))
    assert reported.level is Level.OK
    assert [one.subject for one in of_kubevirt(reported)] == [A10]


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


def test_missing_feature_gates_are_reported() -> None:
    one = found(
        report("{developerConfiguration: {featureGates: [IOMMUFD]}}", "2xGH200"), FindingCode.FEATURE_GATE_MISSING
    )
    assert one.message.endswith("GraceIOVirtualization, PCINUMAAwareTopology")
    gates = "GraceIOVirtualization, PCINUMAAwareTopology, IOMMUFD"
    reported = report(f"{{developerConfiguration: {{featureGates: [{gates}]}}}}", "2xGH200")
    assert FindingCode.FEATURE_GATE_MISSING not in codes(reported)
    assert any("v1.8.0 has the gates" in one.message for one in findings(reported))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"missing required field `kind`"),
        ("kind: VirtualMachine\n", r"f: \$\.kind: is a VirtualMachine; expected KubeVirt"),
        ("kind: List\nitems: [{kind: Pod}]", r"is a Pod; expected KubeVirt"),
        ("kind: KubeVirt\nspec: {configuration: {permittedHostDevices: [1]}}", r"\$\.spec\.configuration"),
        ("[", r"not YAML"),
    ],
)
def test_a_file_that_is_no_kubevirt_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, where="f")
