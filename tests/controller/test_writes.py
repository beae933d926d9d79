"""Each write of the controller has a log line with the change and the reason."""

from gpuvirt.controller.kubevirt.changes import PatchHistory
from gpuvirt.controller.kubevirt.decisions import PatchKubeVirt
from gpuvirt.controller.kubevirt.planning import KubeVirtPlan
from gpuvirt.controller.nodes.resolve import AppliedSpec, applied
from gpuvirt.controller.writes import ApplyGpuNode, DeleteObject, PatchNode, WriteTarget
from gpuvirt.kube.jsonpatch import Op, Operation
from gpuvirt.kube.kinds.gpunode import GPU_NODES, Origins, Withheld
from gpuvirt.kube.kinds.kubevirt import KUBEVIRTS
from gpuvirt.kube.labels import DesiredLabels, LabelPatch
from gpuvirt.kube.resources import NODES
from gpuvirt.model.desired.gpumodes import DesiredMode
from tests.controller.observedcluster import ObservedCluster, node


def test_a_nodes_labels_and_annotations() -> None:
    patch = LabelPatch(DesiredLabels({"a": "b", "c": None}, {"d": "e"}))
    assert PatchNode(WriteTarget(NODES, "node01"), patch).text == "patched node node01: a=b, c removed, d=e"


def test_the_log_line_of_a_gpunode_names_each_field_and_its_origin() -> None:
    def text(spec: AppliedSpec) -> str:
        return ApplyGpuNode(WriteTarget(GPU_NODES, "node01"), applied("node01", spec)).text

    origins = Origins(mode="label x", vgpu_config="policy y")
    whole = AppliedSpec(mode=DesiredMode.VGPU, vgpu_config="A10-4Q", origins=origins)
    assert text(whole) == "applied GpuNode node01: mode vgpu (label x), vGPU config A10-4Q (policy y)"
    by_admin = Origins(mode="set in this GpuNode by kubectl", vgpu_config="set in this GpuNode by kubectl")
    withheld = (Withheld(resource="nvidia.com/a", code="ForeignProvider", message="KubeVirt offers it"),)
    assert text(AppliedSpec(origins=by_admin, withheld=withheld)) == (
        "applied GpuNode node01: mode set in this GpuNode by kubectl, vGPU config set in this GpuNode by kubectl,"
        " nvidia.com/a is withheld: ForeignProvider"
    )


def test_the_log_line_of_a_deletion_names_the_object_and_the_reason() -> None:
    gone = DeleteObject(WriteTarget(GPU_NODES, "node01"), "uid-1", "its node no longer exists")
    assert gone.text == "deleted gpunodes node01: its node no longer exists"


def test_the_log_line_of_a_kubevirt_patch_omits_test_operations() -> None:
    operations = (Operation(Op.TEST, "/metadata/resourceVersion", "1"), Operation(Op.ADD, "/spec/x", {"a": 1}))
    plan = KubeVirtPlan(PatchHistory(), KUBEVIRTS, "kubevirt", operations)
    assert (
        PatchKubeVirt(WriteTarget(KUBEVIRTS, "kubevirt"), plan).text
        == 'patched kubevirts kubevirt: add /spec/x {"a":1}'
    )


def test_every_write_has_a_log_line() -> None:
    texts = [write.text for write in ObservedCluster([node("vm-vgpu")]).decided().writes]
    assert texts[0].startswith("patched node node01: nvidia.com/gpu.present=true, nvidia.com/gpu.deploy.")
    assert texts[1] == (
        "applied GpuNode node01: mode vgpu (label nvidia.com/gpu.workload.config),"
        " vGPU config default (ClusterPolicy cluster-policy $.spec.vgpuDeviceManager.config.default)"
    )
    assert texts[-1].startswith("ClusterPolicy cluster-policy is notReady: ImageUnknown: node node01: ")
