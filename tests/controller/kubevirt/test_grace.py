"""Grace GPUs: an entry for one makes KubeVirt refuse VMs until its gates are on, so the controller withholds it."""

import pytest

from gpuvirt.controller.kubevirt.offered import Names
from gpuvirt.model.devices.candidates import ResourceKind, Selectors
from gpuvirt.model.kubevirt.kubevirt import GRACE_GATES
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.plain import Plain
from tests.controller.kubevirt.kubevirts import (
    A10,
    OFFERED,
    Cluster,
    Fields,
    at,
    codes,
    entry,
    hyper_converged,
    kubevirt,
)

PERMITTED = ("spec", "configuration", "permittedHostDevices")
PCI = (*PERMITTED, "pciHostDevices")
GH200, IDS = "nvidia.com/GH100_GH200_480GB", ("10DE:2342",)
BOTH = {A10: OFFERED[A10], GH200: Selectors(ResourceKind.WHOLE, IDS)}
OUR_A10, OUR_GH200 = entry("10DE:2236", A10), entry(IDS[0], GH200)
OWNED_BY_HCO: Plain = {"app.kubernetes.io/managed-by": "hco-operator"}


def gated(*gates: str, **more: Plain) -> Fields:
    return {"developerConfiguration": {"featureGates": [*gates]}, **more}


def cluster(configuration: Fields, version: str = "v1.9.0", names: Names | None = None) -> Cluster:
    return Cluster(kubevirt(configuration, version), BOTH, names or Names(), mdevs=False)


def entries(found: Cluster) -> Plain:
    found.step()
    assert found.plan.patch == ()
    return at(found.document, *PCI)


@pytest.mark.parametrize(
    ("version", "gates", "withheld"),
    [
        ("v1.9.0", (), True),
        ("v1.9.0", GRACE_GATES[:2], True),
        ("v1.9.0", GRACE_GATES, False),
        ("v1.9.0-rc.0", (), True),
        ("devel", (), True),
        ("v1.8.4", (), False),
    ],
)
def test_an_entry_for_a_grace_gpu_waits_for_the_gates(version: str, gates: tuple[str, ...], withheld: bool) -> None:
    found = cluster(gated(*gates), version)
    assert entries(found) == ([OUR_A10] if withheld else [OUR_A10, OUR_GH200])
    assert codes(found.plan) == ([ReasonCode.GRACE_GATES_MISSING] if withheld else [])
    if withheld:
        (reason,) = found.plan.reasons
        assert reason.subject == GH200
        assert all((gate in reason.message) is (gate not in gates) for gate in GRACE_GATES)
        assert "devices.kubevirt.io/iommufd" in str(reason.fix)
        found.restore({"configuration": gated(*GRACE_GATES, permittedHostDevices=at(found.document, *PERMITTED))})
        assert entries(found) == [OUR_A10, OUR_GH200]
        assert found.plan.reasons == ()


def test_a_disabled_gate_is_off() -> None:
    developer: Fields = {"featureGates": list(GRACE_GATES[:2]), "disabledFeatureGates": [GRACE_GATES[2]]}
    found = cluster({"developerConfiguration": developer})
    assert entries(found) == [OUR_A10]
    assert codes(found.plan) == [ReasonCode.GRACE_GATES_MISSING]


def test_a_gate_that_is_enabled_and_disabled_is_on() -> None:
    """KubeVirt looks into `featureGates` first."""
    developer: Fields = {"featureGates": list(GRACE_GATES), "disabledFeatureGates": [GRACE_GATES[2]]}
    found = cluster({"developerConfiguration": developer})
    assert entries(found) == [OUR_A10, OUR_GH200]
    assert codes(found.plan) == []


def test_no_list_is_created_without_a_grace_gpu_that_a_vm_uses() -> None:
    """Without a list KubeVirt admits the VM; with the entry, and without it, KubeVirt would refuse the VM."""
    found = cluster(gated(), names=Names(gpus=frozenset({GH200}), scheduled=frozenset({GH200})))
    assert entries(found) is None
    assert codes(found.plan) == [ReasonCode.GRACE_GATES_MISSING]
    found.names = Names()
    assert entries(found) == [OUR_A10]


def test_an_existing_entry_stays_and_is_reported() -> None:
    """An upgrade of KubeVirt can bring this about."""
    found = cluster(gated(permittedHostDevices={"pciHostDevices": [OUR_A10, OUR_GH200]}))
    assert entries(found) == [OUR_A10, OUR_GH200]
    assert codes(found.plan) == [ReasonCode.GRACE_GATES_MISSING]


def test_the_gates_of_hcos_kubevirt_count() -> None:
    for gates, listed in ((GRACE_GATES, [A10, GH200]), ((), [A10])):
        document = kubevirt(gated(*gates), "v1.9.0", labels=OWNED_BY_HCO)
        found = Cluster(document, BOTH, hco=hyper_converged(), mdevs=False)
        found.step()
        lists = at(found.hco, "spec", "permittedHostDevices", "pciHostDevices")
        assert isinstance(lists, list)
        assert [at(device_list, "resourceName") for device_list in lists] == listed
