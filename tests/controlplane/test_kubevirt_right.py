"""KubeVirt patches on a real API server: gpuvirt's, an admin's beside them, and concurrent writers."""

import json
from datetime import UTC, datetime

import pytest
from lab.cluster.kubevirtkinds import SOURCES

from gpuvirt.controller.kubevirt.changes import ANNOTATION, PatchHistory
from gpuvirt.controller.kubevirt.decisions import HISTORY
from gpuvirt.controller.kubevirt.offered import Names, names_of
from gpuvirt.controller.kubevirt.planning import KubeVirtPicture, KubeVirtPlan, Manner, plan
from gpuvirt.controller.kubevirt.undoer import undo
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiRefusedError
from gpuvirt.kube.kinds.kubevirt import (
    HYPER_CONVERGEDS,
    INSTANCES,
    KUBEVIRTS,
    VIRTUAL_MACHINES,
    HyperConverged,
    KubeVirt,
)
from gpuvirt.kube.resources import Collection, Resource
from gpuvirt.model.desired.observed import Observed
from gpuvirt.plain import Plain
from tests.cli.commandline import gpuvirt
from tests.cluster.kubevirtkinds import install
from tests.cluster.labnamespace import LabNamespace
from tests.controller.kubevirt.kubevirts import A10, OFFERED, T4_8Q, at, entry

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LISTS = ("spec", "configuration", "permittedHostDevices")
GUIDES_PATCH = (
    '[{"op": "add", "path": "/spec/configuration/developerConfiguration/featureGates/-",'
    ' "value": "DisableMDEVConfiguration" }]'
)
VMI = """
apiVersion: kubevirt.io/v1alpha3
kind: VirtualMachineInstance
metadata: {name: vmi}
spec: {domain: {devices: {gpus: [{deviceName: nvidia.com/GA102GL_A10, name: gpu1}]}}}
"""


class Dependencies:
    """The controller, reduced to one KubeVirt."""

    def __init__(self, node: LabNamespace) -> None:
        self.node = node
        self.client = Client(from_kubeconfig(node.cluster.kubeconfig))
        self.names = Names()
        self.history = PatchHistory()

    async def picture(self) -> KubeVirtPicture:
        """The objects at this moment."""
        kubevirt = await self.client.get(self._of(KUBEVIRTS), "kubevirt", KubeVirt)
        found = await self.client.list(Collection(self._of(HYPER_CONVERGEDS), HyperConverged))
        return KubeVirtPicture(kubevirt, OFFERED, self.names, Observed(found.items), mdevs=True)

    async def plan(self) -> KubeVirtPlan:
        done = plan(await self.picture(), Manner(), self.history, AT)
        self.history = done.history
        return done

    async def send(self, done: KubeVirtPlan) -> None:
        assert done.resource is not None
        after = await self.client.patch(done.resource, done.name, done.writes, PatchType.JSON, KubeVirt)
        self.history = done.landed(after.metadata)

    async def converge(self) -> None:
        """Write once; assert that a second plan is empty."""
        done = await self.plan()
        if done.writes:
            await self.send(done)
        assert (await self.plan()).patch == ()

    def _of(self, resource: Resource) -> Resource:
        return Resource(resource.plural, resource.group, resource.version, self.node.namespace)

    def make(self, kind: str, spec: Plain, version: str = "kubevirt.io/v1", labels: Plain = None) -> None:
        name = "kubevirt" if kind == "KubeVirt" else "kubevirt-hyperconverged"
        metadata = {"name": name, "namespace": self.node.namespace, "labels": labels or {}}
        self.node.apply({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})

    def is_of_version(self, version: str) -> None:
        """Set the version in KubeVirt's status."""
        status = json.dumps({"status": {"observedKubeVirtVersion": version}})
        self.node.kubectl("patch", "kubevirt", "kubevirt", "--subresource=status", "--type=merge", "-p", status)

    def admin_patches(self) -> str:
        """Apply the patch of the GPU Operator's guide."""
        return self.node.kubectl("patch", "kubevirt", "kubevirt", "--type=json", f"-p={GUIDES_PATCH}")

    def found(self, kind: str, *keys: str | int) -> Plain:
        document: Plain = json.loads(self.node.kubectl("get", kind, "-o", "json"))
        return at(document, "items", 0, *keys)


@pytest.fixture(params=SOURCES)
def dependencies(node: LabNamespace, request: pytest.FixtureRequest) -> Dependencies:
    """A cluster with KubeVirt's kinds, by our facts and by KubeVirt's manifests."""
    install(node, request.param)
    return Dependencies(node)


async def test_a_kubevirt_is_patched_and_restored(dependencies: Dependencies) -> None:
    theirs = entry("8086:56C0", "intel.com/flex", None)
    spec: Plain = {"configuration": {"permittedHostDevices": {"pciHostDevices": [theirs]}}}
    dependencies.make("KubeVirt", spec)
    dependencies.is_of_version("v1.8.0")
    before = dependencies.found("kubevirt", "spec")
    await dependencies.converge()
    assert dependencies.found("kubevirt", *LISTS) == {
        "pciHostDevices": [theirs, entry("10DE:2236", A10)],
        "mediatedDevices": [entry("GRID T4-8Q", T4_8Q, key="mdevNameSelector")],
    }
    assert dependencies.found("kubevirt", "spec", "configuration", "mediatedDevicesConfiguration") == {"enabled": False}
    undoing = undo(await dependencies.picture())
    assert undoing.resource is not None
    await dependencies.client.patch(undoing.resource, undoing.name, undoing.patch, PatchType.JSON, KubeVirt)
    assert dependencies.found("kubevirt", "spec") == before
    assert at(dependencies.found("kubevirt"), "metadata", "annotations", ANNOTATION) is None


@pytest.mark.parametrize("version", ["v1.8.0", "v0.58.2"])
async def test_the_guides_patch_converges_before_beside_and_twice(dependencies: Dependencies, version: str) -> None:
    dependencies.make("KubeVirt", {"configuration": {"developerConfiguration": {"featureGates": []}}})
    dependencies.is_of_version(version)
    assert dependencies.admin_patches().strip() == "kubevirt.kubevirt.io/kubevirt patched"
    await dependencies.converge()
    for _ in range(2):
        dependencies.admin_patches()
        await dependencies.converge()
    assert (await dependencies.plan()).reasons == ()
    assert not dependencies.history.stopped


async def test_a_stale_patch_is_refused_after_another_writer(dependencies: Dependencies) -> None:
    dependencies.make("KubeVirt", {})
    dependencies.is_of_version("v1.8.0")
    late = await dependencies.plan()
    theirs = entry("8086:56C0", "intel.com/flex")
    lists = {"spec": {"configuration": {"permittedHostDevices": {"pciHostDevices": [theirs]}}}}
    dependencies.node.kubectl("patch", "kubevirt", "kubevirt", "--type=merge", "-p", json.dumps(lists))
    with pytest.raises(ApiRefusedError, match="422"):
        await dependencies.send(late)
    await dependencies.converge()
    assert dependencies.found("kubevirt", *LISTS, "pciHostDevices") == [theirs, entry("10DE:2236", A10)]
    assert dependencies.history.reverts == ()


async def test_patching_stops_after_a_manifest_is_applied_repeatedly(dependencies: Dependencies) -> None:
    spec: Plain = {"configuration": {}}
    dependencies.make("KubeVirt", spec)
    dependencies.is_of_version("v1.8.0")
    for _ in range(3):
        await dependencies.converge()
        text = json.dumps([{"op": "replace", "path": "/spec", "value": spec}])
        dependencies.node.kubectl("patch", "kubevirt", "kubevirt", "--type=json", "-p", text)
    done = await dependencies.plan()
    assert (done.writes, done.stops_vgpu_changes) == ((), True)


async def test_hyperconverged_lists_accept_gpuvirts_entries(dependencies: Dependencies) -> None:
    dependencies.make("KubeVirt", {}, labels={"app.kubernetes.io/managed-by": "hco-operator"})
    dependencies.is_of_version("v1.8.0")
    dependencies.make("HyperConverged", {}, "hco.kubevirt.io/v1beta1")
    before = dependencies.found("hyperconverged", "spec")
    await dependencies.converge()
    assert dependencies.found("kubevirt", "spec") == {}
    assert dependencies.found("hyperconverged", "spec") == {
        "featureGates": {"disableMDevConfiguration": True},
        "permittedHostDevices": {
            "pciHostDevices": [entry("10DE:2236", A10, key="pciDeviceSelector")],
            "mediatedDevices": [entry("GRID T4-8Q", T4_8Q, key="mdevNameSelector")],
        },
    }
    undoing = undo(await dependencies.picture())
    assert undoing.resource is not None
    await dependencies.client.patch(undoing.resource, undoing.name, undoing.patch, PatchType.JSON, HyperConverged)
    assert dependencies.found("hyperconverged", "spec") == before


async def test_an_uninstall_restores_the_kubevirt(dependencies: Dependencies) -> None:
    spec: Plain = {"configuration": {"developerConfiguration": {"featureGates": ["Theirs"]}}}
    dependencies.make("KubeVirt", spec)
    dependencies.is_of_version("v0.58.2")
    before = dependencies.found("kubevirt", "spec")
    await dependencies.converge()
    kept = {
        "kind": "ConfigMap",
        "apiVersion": "v1",
        "metadata": {"name": HISTORY, "namespace": dependencies.node.namespace},
    }
    dependencies.node.apply(kept)
    pod = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "kata", "namespace": dependencies.node.namespace}}
    asking = {"name": "a", "image": "none", "resources": {"limits": {T4_8Q: "1"}}}
    dependencies.node.apply({**pod, "spec": {"automountServiceAccountToken": False, "containers": [asking]}})
    asks = ("--kubeconfig", str(dependencies.node.cluster.kubeconfig), "--namespace", dependencies.node.namespace)
    reported = gpuvirt("uninstall", *asks).stdout
    keeps = "the gate DisableMDEVConfiguration, which VMs or pods request"
    assert keeps in reported, "otherwise KubeVirt would delete the pod's vGPU"
    gates = ("spec", "configuration", "developerConfiguration", "featureGates")
    assert dependencies.found("kubevirt", *gates) == ["Theirs", "DisableMDEVConfiguration"]
    assert dependencies.found("kubevirt", *LISTS) is None, "without a list every device is permitted"
    dependencies.node.delete("kata")
    done = gpuvirt("uninstall", *asks)
    assert done.returncode == 0, done.stderr
    assert f"removed what gpuvirt had added for KubeVirt {dependencies.node.namespace}/kubevirt" in done.stdout
    assert dependencies.found("kubevirt", "spec") == before
    assert dependencies.node.kubectl("get", "configmaps", "-o", "name").split() == ["configmap/kube-root-ca.crt"]


async def test_device_names_are_read_from_vms(dependencies: Dependencies) -> None:
    dependencies.node.cluster.kubectl("apply", "--namespace", dependencies.node.namespace, "-f", "-", given=VMI)
    instances = await dependencies.client.list(INSTANCES.collection)
    vms = await dependencies.client.list(VIRTUAL_MACHINES.collection)
    names = names_of({VIRTUAL_MACHINES.name: Observed(vms.items), INSTANCES.name: Observed(instances.items)})
    assert names.used == {A10}
