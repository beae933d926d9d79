"""For any KubeVirt or HyperConverged, one patch converges, keeps entries of others and refuses no running VM."""

from copy import deepcopy
from typing import cast

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.controller.kubevirt.changes import ANNOTATION
from gpuvirt.controller.kubevirt.offered import Names
from gpuvirt.controller.kubevirt.planning import Manner
from gpuvirt.model.devices.candidates import ResourceKind, Selectors
from gpuvirt.plain import Plain
from tests.controller.kubevirt.kubevirts import T4_8Q, Cluster, Fields, at, hyper_converged, kubevirt

RESOURCES = ["nvidia.com/GA102GL_A10", "nvidia.com/GRID_T4-8Q", "nvidia.com/GRID_T4-4Q", "example.com/fpga"]
PCI_IDS = ["10DE:2236", "10de:2236", "10DE:1EB8", "8086:56c0"]
TYPES = ["GRID T4-8Q", "GRID_T4-8Q", "GRID T4-4Q"]
GATES = ["GPU", "HostDevices", "DisableMDEVConfiguration", "Snapshot"]
HCO_LABELS: Plain = {"app.kubernetes.io/managed-by": "hco-operator"}


def plain(found: object) -> Plain:
    """Return a generated value with the JSON type."""
    return cast("Plain", found)


def fields(found: object) -> Fields:
    """Return a generated mapping with the JSON type."""
    return cast("Fields", found)


def lists_of(pci_key: str, usb: str, *, unique: bool) -> st.SearchStrategy[Plain]:
    def entries(key: str, selectors: list[str]) -> st.SearchStrategy[Plain]:
        known: dict[str, st.SearchStrategy[object]] = {
            key: st.sampled_from(selectors),
            "resourceName": st.sampled_from(RESOURCES),
            "externalResourceProvider": st.sampled_from([True, True, False]),
            "newer": st.just("a field that we don't know"),
        }
        one = st.fixed_dictionaries({key: known.pop(key), "resourceName": known.pop("resourceName")}, optional=known)
        return st.lists(one, max_size=3, unique_by=(lambda found: str(found[key])) if unique else None).map(plain)

    usb_entry = st.fixed_dictionaries({"resourceName": st.sampled_from(RESOURCES)}).map(plain)
    return st.fixed_dictionaries(
        {},
        optional={
            "pciHostDevices": entries(pci_key, PCI_IDS),
            "mediatedDevices": entries("mdevNameSelector", TYPES),
            usb: st.lists(usb_entry, max_size=1).map(plain),
        },
    ).map(plain)


MEDIATED = st.fixed_dictionaries(
    {},
    optional={
        "enabled": st.booleans(),
        "mediatedDeviceTypes": st.lists(st.just("nvidia-222"), max_size=1),
        "mediatedDevicesTypes": st.lists(st.just("nvidia-223"), max_size=1),
        "nodeMediatedDeviceTypes": st.lists(st.just({"nodeSelector": {}}), max_size=1),
    },
)
DEVELOPER = st.fixed_dictionaries(
    {},
    optional={
        "featureGates": st.lists(st.sampled_from(GATES), max_size=4),
        "disabledFeatureGates": st.lists(st.sampled_from(GATES), max_size=1),
        "logVerbosity": st.just({"virtAPI": 3}),
    },
)
CONFIGURATIONS = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "permittedHostDevices": lists_of("pciVendorSelector", "usb", unique=False),
        "mediatedDevicesConfiguration": MEDIATED,
        "developerConfiguration": DEVELOPER,
        "cpuModel": st.just("host-model"),
    },
).map(fields)
SPECS = st.fixed_dictionaries(
    {},
    optional={
        "permittedHostDevices": lists_of("pciDeviceSelector", "usbHostDevices", unique=True),
        "mediatedDevicesConfiguration": MEDIATED,
        "featureGates": st.fixed_dictionaries(
            {}, optional={"disableMDevConfiguration": st.booleans(), "alignCPUs": st.booleans()}
        ),
        "infra": st.just({}),
    },
).map(fields)
VERSIONS = st.sampled_from(["v1.9.0", "v1.8.0", "v1.8.0-rc.0", "v1.3.0", "v0.58.2", "v0.59.0", "", "sha256:1"])
SELECTORS = st.builds(
    Selectors,
    st.sampled_from(ResourceKind),
    st.lists(st.sampled_from(PCI_IDS[::2]), max_size=2, unique=True).map(tuple),
    st.lists(st.sampled_from(TYPES[::2]), max_size=1).map(tuple),
).filter(lambda kernel: bool(kernel.pci or kernel.mdev))
OFFERS = st.dictionaries(st.sampled_from(RESOURCES[:3]), SELECTORS, max_size=3)
SOME = st.frozensets(st.sampled_from([*RESOURCES, "amd.com/mi210"]), max_size=2)
NAMES = st.builds(Names, SOME, SOME, SOME, st.sampled_from([(), (), (), ("pools",)]), SOME, SOME)
KUBEVIRTS = st.builds(kubevirt, CONFIGURATIONS, VERSIONS)
CLUSTERS = st.builds(Cluster, KUBEVIRTS, OFFERS, NAMES, mdevs=st.booleans()) | st.builds(
    Cluster,
    st.builds(kubevirt, version=VERSIONS, labels=st.just(HCO_LABELS)),
    OFFERS,
    NAMES,
    SPECS.map(hyper_converged),
)


def lists(cluster: Cluster) -> Plain:
    place = ("spec",) if cluster.hco is not None else ("spec", "configuration")
    return at(cluster.subject, *place, "permittedHostDevices")


def entries(cluster: Cluster) -> list[Plain]:
    found: list[Plain] = []
    permitted = lists(cluster)
    for name in sorted(permitted) if isinstance(permitted, dict) else ():
        one = at(permitted, name)
        found += one if isinstance(one, list) else []
    return found


def permits(cluster: Cluster, name: str) -> bool:
    return lists(cluster) is None or any(at(entry, "resourceName") == name for entry in entries(cluster))


def without_empty(document: Plain) -> Plain:
    """Return a document without empty fields and without the API server's version numbers."""
    if isinstance(document, dict):
        inner = {key: without_empty(value) for key, value in document.items()}
        return {
            key: value
            for key, value in inner.items()
            if key not in {"resourceVersion", "generation"} and value not in ({}, [])
        }
    return [without_empty(item) for item in document] if isinstance(document, list) else document


def is_part(part: list[Plain], whole: list[Plain]) -> bool:
    """Return whether `whole` contains all items of `part` in the same order."""
    rest = iter(whole)
    return all(any(item == other for other in rest) for item in part)


@given(cluster=CLUSTERS)
def test_a_single_patch_converges(cluster: Cluster) -> None:
    done = cluster.step()
    again = cluster.plan
    assert again.patch == ()
    assert again.history == cluster.history
    assert done.writes == done.patch
    assert not again.history.stopped


@given(cluster=CLUSTERS)
def test_entries_of_other_writers_are_unchanged(cluster: Cluster) -> None:
    before, existing = deepcopy(cluster.subject), entries(cluster)
    cluster.step()
    assert is_part(existing, entries(cluster))
    gates = at(before, "spec", "configuration", "developerConfiguration", "featureGates") or []
    after = at(cluster.subject, "spec", "configuration", "developerConfiguration", "featureGates") or []
    assert isinstance(gates, list)
    assert isinstance(after, list)
    assert after[: len(gates)] == gates
    assert at(cluster.subject, "spec", "configuration", "cpuModel") == at(before, "spec", "configuration", "cpuModel")


@given(cluster=CLUSTERS, then=st.lists(st.tuples(OFFERS, NAMES), max_size=3), prune=st.booleans())
def test_devices_in_use_stay_permitted(
    cluster: Cluster, then: list[tuple[dict[str, Selectors], Names]], prune: bool
) -> None:
    cluster.manner = Manner(prune=prune)
    for offered, names in [(cluster.offered, cluster.names), *then]:
        cluster.offered, cluster.names = offered, names
        usable = names.used & (names.on_nodes | names.scheduled | offered.keys())
        had = {name for name in usable if permits(cluster, name)}
        had_lists = lists(cluster) is not None
        cluster.step()
        assert {name for name in had if not permits(cluster, name)} == set()
        assert lists(cluster) is not None or not had_lists, "no request removes a list"
        assert cluster.plan.patch == ()


@given(cluster=CLUSTERS)
def test_every_offered_resource_is_permitted_or_reported(cluster: Cluster) -> None:
    cluster.step()
    subjects = {reason.subject for reason in cluster.plan.reasons}
    assert all(permits(cluster, name) for name in cluster.offered.keys() - subjects)


@given(cluster=CLUSTERS, twice=st.tuples(OFFERS, NAMES))
def test_undoing_restores_the_original_document(cluster: Cluster, twice: tuple[dict[str, Selectors], Names]) -> None:
    before = deepcopy(cluster.subject)
    cluster.step()
    cluster.offered, cluster.names = twice
    cluster.step()
    cluster.names = Names()
    cluster.write(cluster.undoing.patch)
    assert without_empty(cluster.subject) == without_empty(before)
    assert cluster.undoing.patch == ()


@given(cluster=CLUSTERS, names=NAMES)
def test_undoing_keeps_entries_that_vms_reference(cluster: Cluster, names: Names) -> None:
    cluster.step()
    cluster.names = names
    had = {name for name in names.used if permits(cluster, name)}
    mdevs = {name: selectors for name, selectors in cluster.offered.items() if selectors.mdev and name in names.used}
    unmanaged = replace(cluster, manner=Manner(manage=False), offered=mdevs)
    safe = not unmanaged.plan.stops_vgpu_changes
    cluster.write(cluster.undoing.patch)
    assert {name for name in had if not permits(cluster, name)} == set()
    assert cluster.undoing.patch == ()
    unmanaged = replace(cluster, manner=Manner(manage=False), offered=mdevs)
    assert not (safe and unmanaged.plan.stops_vgpu_changes), "KubeVirt would delete the vGPUs of VMs"
    annotation = at(cluster.subject, "metadata", "annotations", ANNOTATION)
    assert (annotation is not None) is bool(cluster.undoing.reasons)


def test_undoing_keeps_the_mdev_gate_for_vgpus_in_use_and_drops_the_gpu_gate() -> None:
    cluster = Cluster(kubevirt({"developerConfiguration": {"featureGates": []}}, version="v0.58.2"))
    cluster.step()
    gates = ("spec", "configuration", "developerConfiguration", "featureGates")
    assert at(cluster.document, *gates) == ["GPU", "DisableMDEVConfiguration"]
    cluster.names = Names(by_others=frozenset({T4_8Q, "cpu"}))
    cluster.write(cluster.undoing.patch)
    assert at(cluster.document, *gates) == ["DisableMDEVConfiguration"]
    cluster.names = Names(by_others=frozenset({"cpu"}))
    cluster.write(cluster.undoing.patch)
    assert at(cluster.document, *gates) == []


def test_undoing_again_keeps_what_spares_vgpus_in_use_although_the_gpunodes_are_gone() -> None:
    """The first uninstallation deletes the GpuNodes; helm's hook may run a second one while a VM has its vGPU."""
    cluster = Cluster(kubevirt({}))
    cluster.step()
    switch = ("spec", "configuration", "mediatedDevicesConfiguration", "enabled")
    assert at(cluster.document, *switch) is False
    cluster.names = Names(by_others=frozenset({T4_8Q, "cpu"}))
    cluster.write(cluster.undoing.patch)
    cluster.offered, cluster.mdevs = {}, False
    cluster.write(cluster.undoing.patch)
    assert at(cluster.document, *switch) is False
    cluster.names = Names(by_others=frozenset({"cpu"}))
    cluster.write(cluster.undoing.patch)
    assert at(cluster.document, *switch) is None
