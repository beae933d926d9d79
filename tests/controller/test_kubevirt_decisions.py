"""KubeVirt among the controller's decisions: what is stored before a patch, withheld, and reported."""

import msgspec
import pytest
from msgspec.structs import replace
from msgspec.structs import replace as with_

from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.deployment import StoredObject
from gpuvirt.controller.kubevirt.decisions import HISTORY, KubeVirtObserved, PatchKubeVirt, kept_histories, kept_text
from gpuvirt.controller.kubevirt.offered import Requesting
from gpuvirt.controller.nodes.resolve import ManagedMetadata, OwnedGpuNode
from gpuvirt.controller.writes import ApplyGpuNode, ApplyObject, PatchPolicyStatus
from gpuvirt.kube.kinds.core import NodeStatus
from gpuvirt.kube.kinds.gpunode import Gpu, Offered, Spec, Status, Withheld
from gpuvirt.kube.kinds.kubevirt import DEVICE_KINDS, VIRTUAL_MACHINES, KubeVirt, VirtualMachine
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.kinds.workloads import ConfigMap
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import Observed
from gpuvirt.model.devices.candidates import ResourceKind
from gpuvirt.model.reasons import ReasonCode
from tests.controller.kubevirt.kubevirts import T4_8Q, Fields, kubevirt
from tests.controller.observedcluster import SETTINGS, ObservedCluster, node, policy

NOTHING_ASKED: Requesting = {kind.name: Observed(()) for kind in DEVICE_KINDS}


def vgpu_node() -> OwnedGpuNode:
    """Return a GpuNode whose vGPUs are in their desired state."""
    ready = Condition(type="Ready", status="True", reason="Reconciled", last_transition_time="2026-01-01T00:00:00Z")
    resource = Offered(
        name=T4_8Q, healthy=2, allocated=0, registered=True, kind=ResourceKind.VGPU, mdev_name_selectors=("GRID T4-8Q",)
    )
    status = Status(gpus=(Gpu(address="0000:3b:00.0", mode="vgpu"),), resources=(resource,), conditions=(ready,))
    return OwnedGpuNode(metadata=ManagedMetadata(name="node01"), spec=Spec(mode=DesiredMode.VGPU), status=status)


def observed(document: Fields, kept: StoredObject | None = None) -> KubeVirtObserved:
    found = msgspec.convert(document, KubeVirt)
    key = ObjectKey(found.metadata.namespace, found.metadata.name)
    return KubeVirtObserved({key: found}, Observed(None), NOTHING_ASKED, kept_histories(kept), kept=kept_text(kept))


def observed_cluster(document: Fields, kept: StoredObject | None = None) -> ObservedCluster:
    return ObservedCluster([node("vm-vgpu")], gpu_nodes=[vgpu_node()], kubevirt=observed(document, kept))


def kept_by(decisions: Decisions) -> StoredObject | None:
    """Return the ConfigMap that was written, as the API server stores it."""
    for write in decisions.writes:
        if isinstance(write, ApplyObject) and write.target.name == HISTORY:
            assert isinstance(write.content, ConfigMap)
            return msgspec.json.decode(msgspec.json.encode(write.content), type=StoredObject)
    return None


def patches(decisions: Decisions) -> list[PatchKubeVirt]:
    return [write for write in decisions.writes if isinstance(write, PatchKubeVirt)]


def condition(decisions: Decisions) -> Condition | None:
    (status,) = (write.status for write in decisions.writes if isinstance(write, PatchPolicyStatus))
    return next((condition for condition in status.conditions if condition.type == "KubeVirtConfigured"), None)


def spec_of(decisions: Decisions) -> Spec | None:
    found = [write.content.spec for write in decisions.writes if isinstance(write, ApplyGpuNode)]
    if not found:
        return None
    (first,) = found
    return Spec(mode=first.mode or DesiredMode.UNMANAGED, withheld=first.withheld, reviewed=first.reviewed)


LACKING = kubevirt({})
FOREIGN = kubevirt(
    {"permittedHostDevices": {"mediatedDevices": [{"mdevNameSelector": "GRID T4-8Q", "resourceName": T4_8Q}]}}
)


def on_demand_node() -> OwnedGpuNode:
    """Return a GpuNode in mode on-demand, as its agent reports it while no pod has a vGPU."""
    ready = Condition(type="Ready", status="True", reason="Reconciled", last_transition_time="2026-01-01T00:00:00Z")
    resource = Offered(
        name="tencent.com/vgpu-231",
        healthy=1,
        allocated=0,
        registered=True,
        kind=ResourceKind.VGPU,
        mdev_name_selectors=("GRID T4-8Q",),
    )
    status = Status(gpus=(Gpu(address="0000:3b:00.0", mode="vgpu"),), resources=(resource,), conditions=(ready,))
    return OwnedGpuNode(metadata=ManagedMetadata(name="node01"), spec=Spec(mode=DesiredMode.ON_DEMAND), status=status)


def test_kubevirt_permits_the_types_of_a_node_on_demand_and_leaves_its_vgpus_alone() -> None:
    def on_demand(kept: StoredObject | None = None) -> Decisions:
        found = observed(LACKING, kept)
        return ObservedCluster([node("on-demand")], gpu_nodes=[on_demand_node()], kubevirt=found).decided()

    (patch,) = patches(on_demand(kept_by(on_demand())))
    assert {
        (
            'add /spec/configuration/permittedHostDevices/mediatedDevices/- {"mdevNameSelector":"GRID T4-8Q",'
            '"resourceName":"tencent.com/vgpu-231","externalResourceProvider":true}'
        ),
        "add /spec/configuration/mediatedDevicesConfiguration/enabled false",
    } <= {write.text for write in patch.plan.writes}


def test_a_type_has_an_entry_for_each_name_by_which_nodes_offer_it() -> None:
    other = with_(vgpu_node(), metadata=ManagedMetadata(name="node02"))

    def decided(kept: StoredObject | None = None) -> Decisions:
        nodes = [node("on-demand"), node("vm-vgpu", "node02")]
        return ObservedCluster(nodes, gpu_nodes=[on_demand_node(), other], kubevirt=observed(LACKING, kept)).decided()

    (patch,) = patches(decided(kept_by(decided())))
    added = [write.text for write in patch.plan.writes if '{"mdevNameSelector":"GRID T4-8Q"' in write.text]
    assert len(added) == 2
    assert all(f'"resourceName":"{name}"' in " ".join(added) for name in (T4_8Q, "tencent.com/vgpu-231"))


def test_no_vgpu_is_created_on_demand_while_kubevirt_would_delete_it() -> None:
    found = ObservedCluster([node("on-demand")], gpu_nodes=[on_demand_node()], kubevirt=observed(LACKING))
    spec = spec_of(found.decided(replace(SETTINGS, manages_kubevirt=False)))
    assert spec is not None
    assert spec.mode is DesiredMode.UNMANAGED


def test_the_previous_kubevirt_values_are_stored_before_the_patch() -> None:
    first = observed_cluster(LACKING).decided()
    assert patches(first) == []
    kept = kept_by(first)
    assert kept is not None
    second = observed_cluster(LACKING, kept).decided()
    assert kept_by(second) is None
    (patch,) = patches(second)
    assert patch.target.name == "kubevirt"
    assert any(T4_8Q in write.text for write in patch.plan.writes)


@pytest.mark.parametrize(("capacity", "creates"), [({}, True), ({"amd.com/mi210": "0"}, False)])
def test_a_list_is_created_by_the_names_that_nodes_have(capacity: dict[str, str], creates: bool) -> None:
    """A node keeps the name while the device plugin is away, with a capacity of 0; tenants can't write it."""
    text = '{"metadata": {"name": "a"}, "spec": {"template": {"spec": {"domain": {"devices": %s}}}}}'
    vm = msgspec.json.decode(text % '{"gpus": [{"deviceName": "amd.com/mi210"}]}', type=VirtualMachine)
    asked: Requesting = {**NOTHING_ASKED, VIRTUAL_MACHINES.name: Observed((vm,))}
    first = with_(node("vm-vgpu"), status=NodeStatus(capacity=capacity))
    history = kept_by(observed_cluster(LACKING).decided())
    found = replace(observed(LACKING, history), requesting=asked)
    (patch,) = patches(ObservedCluster([first], gpu_nodes=[vgpu_node()], kubevirt=found).decided())
    assert any("permittedHostDevices" in write.text for write in patch.plan.writes) is creates
    assert [reason.code for reason in patch.plan.reasons] == [ReasonCode.RESOURCE_NOT_PERMITTED]


def test_an_unmanaged_kubevirt_is_reported_with_the_patch_and_not_patched() -> None:
    found = observed_cluster(LACKING).decided(replace(SETTINGS, manages_kubevirt=False))
    assert patches(found) == []
    reported = condition(found)
    assert reported is not None
    assert (reported.status, reported.reason) == ("False", "KubeVirtNotManaged")
    assert "would write: " in reported.message
    assert T4_8Q in reported.message


def test_a_resource_that_kubevirt_provides_is_withheld_on_its_nodes() -> None:
    found = observed_cluster(FOREIGN).decided()
    spec = spec_of(found)
    assert spec is not None
    assert [(withheld.resource, withheld.code) for withheld in spec.withheld] == [(T4_8Q, "ForeignProvider")]
    reported = condition(found)
    assert reported is not None
    assert reported.reason == "ForeignProvider"


def test_resources_are_reviewed_after_the_agent_reports_their_selectors() -> None:
    none = KubeVirtObserved({}, Observed(None), NOTHING_ASKED)
    for document in (observed(FOREIGN), observed(LACKING), none):
        spec = spec_of(ObservedCluster([node("vm-vgpu")], gpu_nodes=[vgpu_node()], kubevirt=document).decided())
        assert spec is not None
        assert spec.reviewed == (T4_8Q,)
    status = vgpu_node().status
    assert status is not None
    bare = with_(status, resources=(with_(status.resources[0], mdev_name_selectors=()),))
    spec = spec_of(
        ObservedCluster([node("vm-vgpu")], gpu_nodes=[with_(vgpu_node(), status=bare)], kubevirt=none).decided()
    )
    assert spec is not None
    assert spec.reviewed == (), "a resource without selectors is not reviewed"


def test_withheld_resources_stay_withheld_while_kubevirt_is_unknown() -> None:
    withheld = (Withheld(resource=T4_8Q, code="ForeignProvider", message="x"),)
    for reviewed in (None, (), (T4_8Q,)):
        spec = Spec(mode=DesiredMode.VGPU, vgpu_config="default", withheld=withheld, reviewed=reviewed)
        before = with_(vgpu_node(), spec=spec)
        found = ObservedCluster([node("vm-vgpu")], gpu_nodes=[before], kubevirt=KubeVirtObserved()).decided()
        then = spec_of(found)
        assert then is not None
        assert (then.withheld, then.reviewed) == (withheld, reviewed), (
            "a new resource is not reviewed while KubeVirt is unknown"
        )
        assert condition(found) is None


def test_without_a_kubevirt_no_condition_is_reported() -> None:
    none = KubeVirtObserved({}, Observed(None), NOTHING_ASKED)
    found = ObservedCluster([node("vm-vgpu")], gpu_nodes=[vgpu_node()], kubevirt=none).decided()
    assert condition(found) is None
    assert patches(found) == []
    assert kept_by(found) is None


KATA = policy({"sandboxWorkloads": {"enabled": True, "mode": "kata"}})
MDEVS_SAFE: Fields = {"mediatedDevicesConfiguration": {"enabled": False}}


def for_kata(workload: str, gpu_nodes: list[OwnedGpuNode], found: KubeVirtObserved) -> Decisions:
    return ObservedCluster([node(workload)], [KATA], gpu_nodes=gpu_nodes, kubevirt=found).decided()


@pytest.mark.parametrize("kubevirts", [None, {}])
@pytest.mark.parametrize(
    ("workload", "mode"),
    [
        ("on-demand", DesiredMode.ON_DEMAND),
        ("vm-passthrough", DesiredMode.PASSTHROUGH),
        ("vm-vgpu", DesiredMode.VGPU),
        ("container", DesiredMode.CONTAINER),
    ],
)
def test_nodes_for_kata_have_their_workload_without_kubevirt(
    workload: str, mode: DesiredMode, kubevirts: dict[ObjectKey, KubeVirt] | None
) -> None:
    decisions = for_kata(workload, [with_(on_demand_node(), spec=None)], KubeVirtObserved(kubevirts))
    found = spec_of(decisions)
    assert found is not None
    assert (found.mode, found.withheld) == (mode, ())
    # Names wait for the review until the kinds of KubeVirt are known to be served or not.
    assert found.reviewed == (None if kubevirts is None else ("tencent.com/vgpu-231",))
    assert condition(decisions) is None


def test_the_configuration_of_kubevirt_is_left_alone_in_mode_kata() -> None:
    found = observed(kubevirt({**MDEVS_SAFE, "permittedHostDevices": {"pciHostDevices": []}}))
    decisions = for_kata("on-demand", [on_demand_node()], found)
    assert patches(decisions) == []
    assert kept_by(decisions) is None
    assert condition(decisions) is None
    assert decisions.progress.kubevirt is None


def test_a_kubevirt_that_deletes_mediated_devices_stops_vgpus_in_mode_kata() -> None:
    decisions = for_kata("on-demand", [on_demand_node()], observed(LACKING))
    stopped = spec_of(decisions)
    assert stopped is not None
    assert stopped.mode is DesiredMode.UNMANAGED
    shown = condition(decisions)
    assert shown is not None
    assert (shown.status, shown.reason) == ("False", "MdevDeletionRisk")
    assert "gpuvirt would write" not in shown.message
    assert patches(decisions) == []


def test_a_resource_of_kubevirts_own_plugin_is_withheld_in_mode_kata() -> None:
    decisions = for_kata("vm-vgpu", [vgpu_node()], observed(FOREIGN))
    found = spec_of(decisions)
    assert found is not None
    assert [(withheld.resource, withheld.code) for withheld in found.withheld] == [
        (T4_8Q, str(ReasonCode.FOREIGN_PROVIDER))
    ]


def test_an_unreadable_kubevirt_is_reported_in_mode_kata() -> None:
    found = for_kata("vm-vgpu", [vgpu_node()], KubeVirtObserved(problems=("list kubevirts: 403",)))
    assert found.progress.kubevirt is not None
    assert found.progress.kubevirt.reason == str(ReasonCode.KUBEVIRT_STATE_UNKNOWN)


def test_a_history_of_patches_survives_mode_kata() -> None:
    first = observed_cluster(LACKING).decided()
    kept = kept_by(first)
    assert kept is not None
    back = ObservedCluster(
        [node("vm-vgpu")], [KATA], gpu_nodes=[vgpu_node()], kubevirt=observed(LACKING, kept)
    ).decided()
    assert back.histories == kept_histories(kept)
