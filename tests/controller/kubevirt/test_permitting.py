"""KubeVirt permits the resources that nodes offer: what is patched, kept and reported."""

import pytest

from gpuvirt.controller.kubevirt.changes import ANNOTATION
from gpuvirt.controller.kubevirt.offered import Names
from gpuvirt.controller.kubevirt.planning import Manner
from gpuvirt.model.devices.candidates import ResourceKind, Selectors
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.plain import Plain
from tests.controller.kubevirt.kubevirts import (
    A10,
    OFFERED,
    T4_4Q,
    T4_8Q,
    Cluster,
    Fields,
    at,
    codes,
    entry,
    hyper_converged,
    kubevirt,
)
from tests.webhook.jsonpatches import PatchError, operations, patched

LISTS = ("spec", "configuration", "permittedHostDevices")
PCI, MDEV = (*LISTS, "pciHostDevices"), (*LISTS, "mediatedDevices")
GATES = ("spec", "configuration", "developerConfiguration", "featureGates")
ENABLED = ("spec", "configuration", "mediatedDevicesConfiguration", "enabled")
OUR_A10, OUR_T4 = entry("10DE:2236", A10), entry("GRID T4-8Q", T4_8Q, key="mdevNameSelector")
GUIDES_PATCH = operations(
    '[{"op": "add", "path": "/spec/configuration/developerConfiguration/featureGates/-",'
    ' "value": "DisableMDEVConfiguration" }]'
)
MI210, FPGA = "amd.com/mi210", "example.com/fpga"
OWNED_BY_HCO: Plain = {"app.kubernetes.io/managed-by": "hco-operator"}


def permitting(*pci: Fields, **more: Plain) -> Fields:
    return {"permittedHostDevices": {"pciHostDevices": [*pci], **more}}


def converged(cluster: Cluster) -> Plain:
    """Return the document after one patch; assert that a second patch is empty."""
    cluster.step()
    assert cluster.plan.patch == ()
    return cluster.subject


def test_a_new_kubevirt_gets_permitted_devices_and_disabled_mdev_handling() -> None:
    after = converged(Cluster(kubevirt()))
    assert at(after, *PCI) == [OUR_A10]
    assert at(after, *MDEV) == [OUR_T4]
    assert at(after, *ENABLED) is False
    assert at(after, *GATES) is None, "GPUs need no feature gate since v1.4"


def test_the_patch_applies_to_a_single_resource_version() -> None:
    cluster = Cluster(kubevirt())
    patch = cluster.plan.patch
    cluster.restore({})
    with pytest.raises(PatchError, match="resourceVersion"):
        patched(cluster.document, patch)


def test_entries_that_an_admin_permitted_are_unchanged() -> None:
    theirs = [entry("8086:56C0", "intel.com/flex"), entry("10de:2236", A10)]
    after = converged(Cluster(kubevirt(permitting(*theirs))))
    assert at(after, *PCI) == theirs, "ids are compared case-insensitively"
    assert at(after, *MDEV) == [OUR_T4]


def test_a_second_selector_is_added_for_the_same_resource() -> None:
    cluster = Cluster(kubevirt(permitting(OUR_A10)), offered={A10: Selectors(ResourceKind.WHOLE, ("10DE:2235",))})
    assert at(converged(cluster), *PCI) == [OUR_A10, entry("10DE:2235", A10)]


@pytest.mark.parametrize(
    "names",
    [
        Names(gpus=frozenset({A10, MI210}), on_nodes=frozenset({A10, MI210, "cpu"})),
        Names(gpus=frozenset({A10, MI210}), scheduled=frozenset({MI210})),
    ],
    ids=["a-node-has-it", "a-vm-uses-it"],
)
def test_no_list_is_created_without_a_name_that_vms_can_use(names: Names) -> None:
    cluster = Cluster(kubevirt(), names=names)
    after = converged(cluster)
    assert at(after, *LISTS) is None
    assert codes(cluster.plan) == [ReasonCode.RESOURCE_NOT_PERMITTED]
    assert MI210 in cluster.plan.reasons[0].text
    assert at(after, *ENABLED) is False, "disabling mdev handling needs no list"


def test_a_request_for_a_name_that_no_node_has_does_not_prevent_the_list() -> None:
    """Any tenant can make such a request, and without a list every device is permitted."""
    cluster = Cluster(kubevirt(), names=Names(gpus=frozenset({A10, "x.com/y"}), on_nodes=frozenset({A10})))
    assert at(converged(cluster), *PCI) == [OUR_A10]
    (reason,) = cluster.plan.reasons
    assert (reason.code, "x.com/y" in reason.message) == (ReasonCode.RESOURCE_NOT_PERMITTED, True)


def test_many_long_requested_names_make_a_short_message() -> None:
    requested = frozenset(f"x.com/{number:04}{'y' * 1000}" for number in range(1000))
    cluster = Cluster(kubevirt(), names=Names(gpus=requested))
    converged(cluster)
    (reason,) = cluster.plan.reasons
    assert len(reason.text) < 1500
    assert "990 more" in reason.message


def test_no_list_is_created_before_all_kinds_are_observed() -> None:
    cluster = Cluster(kubevirt(), names=Names(unknown=("pools",)))
    assert at(converged(cluster), *LISTS) is None
    assert codes(cluster.plan) == [ReasonCode.KUBEVIRT_STATE_UNKNOWN]


@pytest.mark.parametrize(
    "names",
    [
        Names(host_devices=frozenset({FPGA})),
        Names(host_devices=frozenset({FPGA}), on_nodes=frozenset({FPGA})),
        Names(host_devices=frozenset({FPGA}), on_nodes=frozenset({FPGA}), scheduled=frozenset({FPGA})),
    ],
)
def test_a_request_never_removes_our_list(names: Names) -> None:
    cluster = Cluster(kubevirt())
    before = converged(cluster)
    cluster.names = names
    assert converged(cluster) == before
    (reason,) = cluster.plan.reasons
    assert (reason.code, FPGA in reason.message) == (ReasonCode.RESOURCE_NOT_PERMITTED, True)
    cluster.names = Names()
    assert cluster.plan.reasons == ()


def test_what_an_admins_list_refuses_is_not_reported() -> None:
    cluster = Cluster(kubevirt(permitting(OUR_A10)), names=Names(gpus=frozenset({"x.com/y"})))
    converged(cluster)
    assert cluster.plan.reasons == ()


def test_a_list_of_ours_with_an_admins_entry_for_the_name_permits_it() -> None:
    cluster = Cluster(kubevirt())
    converged(cluster)
    theirs = entry("8086:56C0", FPGA)
    lists = at(cluster.document, *PCI)
    assert isinstance(lists, list)
    lists.append(theirs)
    cluster.names = Names(host_devices=frozenset({FPGA}), on_nodes=frozenset({FPGA}))
    assert at(converged(cluster), *PCI) == [OUR_A10, theirs]
    assert cluster.plan.reasons == ()


def test_entries_of_an_absent_node_stay() -> None:
    cluster = Cluster(kubevirt())
    before = converged(cluster)
    cluster.offered = {}
    assert converged(cluster) == before


def test_unused_entries_are_removed_with_pruning() -> None:
    cluster = Cluster(kubevirt(permitting(entry("8086:56C0", "intel.com/flex"))), manner=Manner(prune=True))
    converged(cluster)
    cluster.offered = {T4_4Q: Selectors(ResourceKind.VGPU, (), ("GRID T4-4Q",))}
    cluster.names = Names(gpus=frozenset({T4_8Q}))
    after = converged(cluster)
    assert at(after, *PCI) == [entry("8086:56C0", "intel.com/flex")]
    assert at(after, *MDEV) == [OUR_T4, entry("GRID T4-4Q", T4_4Q, key="mdevNameSelector")]


@pytest.mark.parametrize(
    "theirs",
    [entry("10de:2236", A10, None), entry("10DE:2236", A10, external=False), entry("10DE:2236", "a10.com/x", None)],
)
def test_a_resource_that_kubevirt_provides_is_withheld_until_kubevirt_stops(theirs: Fields) -> None:
    cluster = Cluster(kubevirt(permitting(theirs)))
    after = converged(cluster)
    assert at(after, *PCI) == [theirs], "the admin's own entry is unchanged"
    (withheld,) = cluster.plan.withheld
    assert (withheld.resource, withheld.code) == (A10, ReasonCode.FOREIGN_PROVIDER)
    assert withheld.offered_as == (None if theirs["resourceName"] == A10 else theirs["resourceName"])
    assert "permittedHostDevices.pciHostDevices[0]" in withheld.message
    lists = at(cluster.document, *PCI)
    assert isinstance(lists, list)
    lists[0] = theirs | {"externalResourceProvider": True}
    converged(cluster)
    assert cluster.plan.withheld == ()


def test_our_entry_is_restored_after_another_program_changed_it() -> None:
    cluster = Cluster(kubevirt())
    converged(cluster)
    lists = at(cluster.document, *PCI)
    assert isinstance(lists, list)
    lists[0] = entry("10DE:2236", A10, external=False)
    assert [entry.resource for entry in cluster.plan.withheld] == [A10], (
        "KubeVirt provides the resource until the entry is restored"
    )
    assert at(converged(cluster), *PCI) == [OUR_A10]


@pytest.mark.parametrize(
    ("version", "enabled", "gates"),
    [
        ("v1.9.0", False, None),
        ("v1.8.0", False, None),
        ("v1.8.0-rc.1", None, ["DisableMDEVConfiguration"]),
        ("v1.4.0", None, ["DisableMDEVConfiguration"]),
        ("v1.3.1", None, ["GPU", "DisableMDEVConfiguration"]),
        ("v0.58.2", None, ["GPU", "DisableMDEVConfiguration"]),
        ("v0.59.0", None, ["GPU"]),
        ("devel", None, ["DisableMDEVConfiguration"]),
    ],
)
def test_mdev_handling_is_disabled_by_the_means_of_each_version(
    version: str, enabled: bool | None, gates: list[str] | None
) -> None:
    cluster = Cluster(kubevirt(version=version))
    after = converged(cluster)
    assert at(after, *ENABLED) is enabled
    assert at(after, *GATES) == gates
    old = [ReasonCode.KUBEVIRT_TOO_OLD] if version == "v0.59.0" else []
    assert codes(cluster.plan) == old, "the entries protect the mdev types"


def test_entries_protect_our_mdevs_if_kubevirt_creates_mdevs() -> None:
    own: Fields = {"mediatedDevicesConfiguration": {"nodeMediatedDeviceTypes": [{"nodeSelector": {}}]}}
    cluster = Cluster(kubevirt(own))
    after = converged(cluster)
    assert at(after, *ENABLED) is None
    assert at(after, *MDEV) == [OUR_T4]
    assert not cluster.plan.stops_vgpu_changes
    used = frozenset({MI210})
    cluster = Cluster(kubevirt(own), names=Names(gpus=used, on_nodes=used))
    converged(cluster)
    assert cluster.plan.stops_vgpu_changes
    assert codes(cluster.plan) == [ReasonCode.RESOURCE_NOT_PERMITTED, ReasonCode.MDEV_DELETION_RISK]


TYPES, SELECTED = ["nvidia-222"], {"gpu": "t4"}
BY_NODE: Fields = {"nodeSelector": {"gpu": "t4"}, "mediatedDevicesTypes": ["nvidia-223"]}


@pytest.mark.parametrize(
    ("mediated", "labels", "types"),
    [
        ({"mediatedDeviceTypes": TYPES}, {}, "nvidia-222"),
        ({"mediatedDevicesTypes": TYPES}, {}, "nvidia-222"),
        ({"mediatedDeviceTypes": TYPES, "enabled": True}, {}, "nvidia-222"),
        ({"mediatedDeviceTypes": TYPES, "enabled": False}, {}, None),
        ({"nodeMediatedDeviceTypes": [BY_NODE]}, SELECTED, "nvidia-223"),
        ({"nodeMediatedDeviceTypes": [BY_NODE]}, {"gpu": "a10"}, None),
        ({"nodeMediatedDeviceTypes": [BY_NODE], "mediatedDeviceTypes": TYPES}, SELECTED, "nvidia-223"),
        ({"nodeMediatedDeviceTypes": [BY_NODE], "mediatedDeviceTypes": TYPES}, {}, "nvidia-222"),
        ({"nodeMediatedDeviceTypes": [{"nodeSelector": None}]}, {}, None),
        ({}, SELECTED, None),
    ],
)
def test_kubevirt_as_a_second_owner_of_mdevs_is_reported(
    mediated: Fields, labels: dict[str, str], types: str | None
) -> None:
    cluster = Cluster(kubevirt({"mediatedDevicesConfiguration": mediated}), mdev_nodes={"node01": labels})
    converged(cluster)
    found = [reason for reason in cluster.plan.reasons if reason.code is ReasonCode.MDEVS_OF_KUBEVIRT]
    assert [(types or "") in reason.message and "node01" in reason.message for reason in found] == [True] * bool(types)
    assert not cluster.plan.stops_vgpu_changes


def test_without_mdevs_kubevirts_mdev_handling_stays_enabled() -> None:
    cluster = Cluster(kubevirt(), offered={A10: OFFERED[A10]}, mdevs=False)
    after = converged(cluster)
    assert at(after, "spec", "configuration", "mediatedDevicesConfiguration") is None


def test_host_devices_get_their_feature_gate_and_a_disabled_gate_is_reported() -> None:
    names = Names(host_devices=frozenset({A10}))
    developer: Fields = {"featureGates": ["Snapshot", "Snapshot"]}
    after = converged(Cluster(kubevirt({"developerConfiguration": developer}), names=names))
    assert at(after, *GATES) == ["Snapshot", "Snapshot", "HostDevices"]
    developer = {"disabledFeatureGates": ["HostDevices", "DisableMDEVConfiguration"]}
    cluster = Cluster(kubevirt({"developerConfiguration": developer}, version="v1.7.0"), names=names)
    assert at(converged(cluster), *GATES) is None
    assert codes(cluster.plan) == [ReasonCode.GATE_DISABLED, ReasonCode.GATE_DISABLED]


@pytest.mark.parametrize("version", ["v1.8.0", "v1.2.0", "v0.58.2"])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (2, 0), (0, 2), (1, 1)])
def test_the_guides_patch_beside_gpuvirt_converges(version: str, before: int, after: int) -> None:
    developer: Fields = {"featureGates": []}
    cluster = Cluster(kubevirt({"developerConfiguration": developer}, version))
    for _ in range(before):
        cluster.write(GUIDES_PATCH)
    converged(cluster)
    for _ in range(after):
        cluster.write(GUIDES_PATCH)
        converged(cluster)
    gates = at(cluster.document, *GATES)
    assert isinstance(gates, list)
    assert gates.count("DisableMDEVConfiguration") in {before + after, before + after + 1}
    assert not cluster.history.stopped
    assert cluster.plan.reasons == ()


def test_the_guides_patch_needs_an_existing_list_of_gates() -> None:
    with pytest.raises(PatchError):
        patched(kubevirt(), GUIDES_PATCH)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(kubevirt(annotations={"gpuvirt.io/manage": "false"})),
        Cluster(kubevirt(annotations={"gpuvirt.io/manage": "no"})),
        Cluster(kubevirt(), manner=Manner(manage=False)),
        Cluster(
            kubevirt(labels=OWNED_BY_HCO), hco=hyper_converged() | kubevirt(annotations={"gpuvirt.io/manage": "False"})
        ),
    ],
)
def test_an_opt_out_is_reported_with_the_unwritten_patch(cluster: Cluster) -> None:
    plan = cluster.step()
    assert plan.dry_run
    assert plan.patch
    assert plan.writes == ()
    assert ReasonCode.KUBEVIRT_NOT_MANAGED in codes(plan)
    assert plan.stops_vgpu_changes, "KubeVirt would delete created vGPUs"


def test_a_hyperconverged_is_patched_in_its_own_fields() -> None:
    theirs: Fields = {"pciDeviceSelector": "10DE:1DB6", "resourceName": "nvidia.com/V100", "disabled": True}
    spec: Fields = {
        "featureGates": {"disableMDevConfiguration": False, "alignCPUs": True},
        "permittedHostDevices": {"pciHostDevices": [theirs]},
    }
    cluster = Cluster(kubevirt(labels=OWNED_BY_HCO), hco=hyper_converged(spec))
    after = converged(cluster)
    assert at(after, "spec", "permittedHostDevices") == {
        "pciHostDevices": [theirs, entry("10DE:2236", A10, key="pciDeviceSelector")],
        "mediatedDevices": [OUR_T4],
    }
    assert at(after, "spec", "featureGates") == {"disableMDevConfiguration": True, "alignCPUs": True}
    assert cluster.plan.resource is not None
    assert cluster.plan.resource.path_of(cluster.plan.name).endswith(
        "/apis/hco.kubevirt.io/v1beta1/namespaces/kubevirt-hyperconverged/hyperconvergeds/kubevirt-hyperconverged"
    )
    cluster.write(cluster.undoing.patch)
    assert at(cluster.hco, "spec") == spec


def test_hco_gets_several_resources_of_an_id_by_different_spellings() -> None:
    """All types of an L40S are VFs of one id; KubeVirt compares ids in any case."""
    types = {f"nvidia.com/NVIDIA_L40S-{size}Q": Selectors(ResourceKind.VGPU, ("10DE:26B9",)) for size in (12, 24, 8)}
    cluster = Cluster(kubevirt(labels=OWNED_BY_HCO), hco=hyper_converged(), offered=types, mdevs=False)
    lists = at(converged(cluster), "spec", "permittedHostDevices", "pciHostDevices")
    assert isinstance(lists, list)
    assert {str(at(device_list, "resourceName")) for device_list in lists} == types.keys()
    spelt = [str(at(device_list, "pciDeviceSelector")) for device_list in lists]
    assert len(set(spelt)) == 3
    assert {selector.upper() for selector in spelt} == {"10DE:26B9"}
    assert cluster.plan.reasons == ()


def test_entries_disabled_in_hco_stay_disabled() -> None:
    theirs: Fields = {"pciDeviceSelector": "10de:2236", "resourceName": A10, "disabled": True}
    hco = hyper_converged({"permittedHostDevices": {"pciHostDevices": [theirs]}})
    cluster = Cluster(kubevirt(labels=OWNED_BY_HCO), hco=hco)
    after = converged(cluster)
    assert at(after, "spec", "permittedHostDevices", "pciHostDevices") == [theirs]
    assert codes(cluster.plan) == [ReasonCode.SELECTOR_TAKEN]


def test_a_selector_whose_every_spelling_is_taken_is_reported() -> None:
    spelt = ["10DE:2236", "10De:2236", "10dE:2236", "10de:2236"]
    taken: list[Plain] = [
        {"pciDeviceSelector": selector, "resourceName": f"example.com/{selector[:4]}"} for selector in spelt
    ]
    for taken_entry in taken:
        assert isinstance(taken_entry, dict)
        taken_entry["externalResourceProvider"] = True
    hco = hyper_converged({"permittedHostDevices": {"pciHostDevices": taken}})
    cluster = Cluster(kubevirt(labels=OWNED_BY_HCO), hco=hco, offered={A10: OFFERED[A10]}, mdevs=False)
    assert at(converged(cluster), "spec", "permittedHostDevices", "pciHostDevices") == taken
    assert codes(cluster.plan) == [ReasonCode.SELECTOR_TAKEN]


def test_a_kubevirt_whose_owner_is_unknown_is_not_patched() -> None:
    owner: Plain = [{"apiVersion": "hco.kubevirt.io/v1beta1", "kind": "HyperConverged", "name": "x"}]
    cluster = Cluster(kubevirt(ownerReferences=owner))
    assert cluster.plan.patch == ()
    assert codes(cluster.plan) == [ReasonCode.KUBEVIRT_STATE_UNKNOWN]


def test_an_unreadable_annotation_claims_no_entries() -> None:
    cluster = Cluster(kubevirt(permitting(OUR_A10), annotations={ANNOTATION: "{"}))
    converged(cluster)
    cluster.write(cluster.undoing.patch)
    assert at(cluster.document, *PCI) == [OUR_A10]
