"""A node's view as the status of its GpuNode, and the GpuNode's spec as a request."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.agent.cluster.gpunode import SpecListener, events_between, observe_gpu_node, request_of_spec, status_of
from gpuvirt.facts.ids import DeviceId, PciAddress, PodUid, ResourceName, VgpuId
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.events import EventDraft, EventLevel
from gpuvirt.kube.kinds import gpunode
from gpuvirt.kube.kinds.gpunode import GpuMode, GpuNode, Planning, Spec, Status
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.allocation.ledger import Consumer
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.desired.workload import modes_of
from gpuvirt.model.inventory.inventory import Mode
from gpuvirt.model.offers.view import DeviceView, GpuView, NodeView, ResourceView, VgpuView
from gpuvirt.model.reasons import Reason, ReasonCode

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = ObjectKey("", "node01")
GPU, VGPU = PciAddress("0000:65:00.0"), VgpuId("a97c1d93-75b0-5502-bafc-fef8d1839ded")
A10_4Q = ResourceName("nvidia.com/NVIDIA_A10-4Q")
ILL = Reason(ReasonCode.NODE_MISSING, VGPU, "has no node", fix="look for who deleted it")
EMPTY = GpuNode(metadata=Metadata(name="node01", generation=3))


def picture(*against: Reason, allocated_to: str | None = None) -> NodeView:
    """Return the view of a node with one GPU that carries one vGPU."""
    vgpu = VgpuView(VGPU, "NVIDIA A10-4Q", GPU, A10_4Q, reasons=against)
    device = DeviceView(DeviceId(VGPU), not against, 0, None, GPU, reasons=against, allocated_to=allocated_to)
    gpu = GpuView(GPU, "10de:2236", "gpu", "GA102GL [A10]", Mode.VGPU, "nvidia", None, 0, None, None, vgpus=(vgpu,))
    return NodeView(AT, (gpu,), resources=(ResourceView(A10_4Q, (device,), registered=True),))


def condition(status: Status, kind: str) -> Condition:
    (found,) = (condition for condition in status.conditions if condition.type == kind)
    return found


def test_a_node_view_becomes_a_full_gpunode_status() -> None:
    status = status_of(picture(allocated_to="pod default/vm-a"), EMPTY, AT)
    assert (status.totals.gpus, status.totals.vgpus, status.totals.allocated, status.totals.modes) == (1, 1, 1, "vgpu")
    assert [vgpu.offered_as for gpu in status.gpus for vgpu in gpu.vgpus] == [A10_4Q]
    (offered,) = status.resources
    assert (offered.name, offered.healthy, offered.allocated, offered.registered) == (A10_4Q, 1, 1, True)
    ready = condition(status, "Ready")
    assert (ready.status, ready.reason, ready.observed_generation) == ("True", "Reconciled", 3)
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    assert [gpu.vfs for gpu in status.gpus] == [None], "the status of an earlier agent"


def test_an_unhealthy_gpu_sets_ready_false_with_its_reason() -> None:
    ready = condition(status_of(picture(ILL), EMPTY, AT), "Ready")
    assert (ready.status, ready.reason) == ("False", "NodeMissing")
    assert ready.message == ILL.text


def test_ready_is_unknown_before_the_first_scan() -> None:
    ready = condition(status_of(NodeView(AT, host_observed=False), EMPTY, AT), "Ready")
    assert (ready.status, ready.reason) == ("Unknown", "NotObserved")


def test_an_unchanged_condition_keeps_its_transition_time_and_is_not_written() -> None:
    before = status_of(picture(), EMPTY, AT)
    node = GpuNode(metadata=EMPTY.metadata, status=before)
    later = AT + timedelta(hours=1)
    assert status_of(picture(), node, later) == before
    changed = condition(status_of(picture(ILL), node, later), "Ready")
    assert changed.last_transition_time == "2026-01-02T04:04:05Z"


def test_a_gpunode_spec_is_a_request_and_an_absent_spec_is_observed_as_absent() -> None:
    spec = Spec(mode=DesiredMode.PASSTHROUGH, vgpu_config="A10-4Q", gpus=(GpuMode(address=GPU, mode=DesiredMode.VGPU),))
    desired = GpuNodeSpec("passthrough", {GPU: "vgpu"}, "A10-4Q")
    assert request_of_spec(spec) == NodeRequest(spec=Observed(desired))
    assert request_of_spec(None) == NodeRequest(spec=Observed(None))
    reported = gpunode.Withheld(resource=A10_4Q, code="ForeignProvider", message="is KubeVirt's", offered_as="a.com/x")
    found = request_of_spec(Spec(withheld=(reported,))).spec
    assert found == Observed(
        GpuNodeSpec("unmanaged", withheld=(Withheld(A10_4Q, "ForeignProvider", "is KubeVirt's", "a.com/x"),))
    )


class Observes:
    def __init__(self) -> None:
        self.desired = NodeRequest()

    def take_request(self, delta: NodeRequest) -> None:
        self.desired = self.desired.updated(delta)

    @property
    def listener(self) -> SpecListener:
        return SpecListener(lambda: self.desired, self.take_request)


def test_a_deleted_gpunode_keeps_its_desired_state() -> None:
    """An admin may delete it, or its whole kind, while VMs run."""
    agent = Observes()
    observe = observe_gpu_node(agent.listener, KEY)
    observe(Delta({}))
    assert agent.desired.spec == Observed(None)
    observe(Delta({KEY: GpuNode(metadata=EMPTY.metadata, spec=Spec(mode=DesiredMode.VGPU))}))
    desired = Observed(GpuNodeSpec("vgpu"))
    assert agent.desired.spec == desired
    observe(Delta({}, removed=frozenset({KEY})))
    assert agent.desired.spec == desired
    observe(Delta({KEY: GpuNode(metadata=Metadata(name="node01", generation=1))}))
    assert agent.desired.spec == desired, "the agent recreated the GpuNode, and no spec asks to move GPUs"
    restarted = observe_gpu_node(agent.listener, KEY)
    restarted(Delta({}))
    assert agent.desired.spec == desired, "the GpuNode was deleted while the agent was stopped"


def test_labels_and_settings_apply_again_after_a_spec_is_removed() -> None:
    agent = Observes()
    observe = observe_gpu_node(agent.listener, KEY)
    observe(Delta({KEY: GpuNode(metadata=Metadata(name="node01", generation=2), spec=Spec(mode=DesiredMode.VGPU))}))
    observe(Delta({KEY: GpuNode(metadata=Metadata(name="node01", generation=3))}))
    assert agent.desired.spec == Observed(None)


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        (GpuNodeSpec("whole"), "is not a mode"),
        (GpuNodeSpec("vgpu", {GPU: "container"}), "sets container and vgpu"),
    ],
)
def test_an_invalid_spec_keeps_the_previous_modes(spec: GpuNodeSpec, reported: str) -> None:
    before = Modes(DesiredMode.PASSTHROUGH)
    modes, problem = modes_of(Settings(), NodeRequest(spec=Observed(spec)), before)
    assert modes == before
    assert problem is not None
    assert reported in problem.reason.text


def test_a_spec_precedes_the_label_and_the_settings() -> None:
    settings = Settings(workload_label=True, mode=DesiredMode.CONTAINER, modes={GPU: DesiredMode.UNMANAGED})
    request = NodeRequest(workload=Observed("vm-vgpu"), spec=Observed(GpuNodeSpec("passthrough")))
    assert modes_of(settings, request, Modes()) == (Modes(DesiredMode.PASSTHROUGH), None)


def test_a_changed_condition_yields_an_event_once_and_a_first_status_none() -> None:
    first = status_of(picture(), EMPTY, AT)
    ill = status_of(picture(ILL), EMPTY, AT)
    assert list(events_between(None, ill)) == []
    assert list(events_between(first, first)) == []
    assert list(events_between(first, ill)) == [EventDraft(EventLevel.WARNING, "NodeMissing", ILL.text)]
    assert list(events_between(ill, first)) == [
        EventDraft(EventLevel.NORMAL, "Reconciled", "all GPUs are in their desired state")
    ]


def test_a_new_resource_under_review_yields_no_event() -> None:
    awaited = Reason(ReasonCode.AWAITS_CONTROLLER, A10_4Q, "is not registered yet")
    waiting = status_of(picture(awaited), EMPTY, AT)
    assert condition(waiting, "Ready").status == "False"
    assert list(events_between(status_of(picture(), EMPTY, AT), waiting)) == []


def test_a_gpu_that_changes_its_mode_yields_an_event() -> None:
    before = status_of(picture(), EMPTY, AT)
    (gpu,) = before.gpus
    whole = replace(before, gpus=(replace(gpu, mode="passthrough"),))
    assert list(events_between(before, whole)) == [
        EventDraft(EventLevel.NORMAL, "ModeChanged", f"{GPU} changed from mode vgpu to passthrough")
    ]


def test_a_node_is_not_ready_until_a_gpu_that_disappeared_is_back_or_its_gpunode_was_deleted() -> None:
    before, empty = status_of(picture(), EMPTY, AT), replace(picture(), gpus=())
    before = replace(
        before,
        gpus=tuple(replace(gpu, planning=Planning(pci_id="10DE:2236", class_code=0x030200)) for gpu in before.gpus),
    )

    def after(status: Status, view: NodeView) -> Status:
        return status_of(view, replace(EMPTY, status=status), AT)

    gone = after(before, empty)
    ready = condition(gone, "Ready")
    assert (gone.gone, ready.status, ready.reason) == ((GPU,), "False", "GpuGone")
    assert "kubectl delete gpunode node01" in ready.message
    assert list(events_between(before, gone)) == [
        EventDraft(EventLevel.WARNING, "GpuGone", f"{GPU} has disappeared from the host")
    ]
    assert after(gone, empty) == gone, "also after a restart of the agent"
    assert after(gone, replace(empty, host_observed=False)).gone == (GPU,), "not observed is not back"
    back = after(gone, picture())
    assert (back.gone, condition(back, "Ready").status) == ((), "True")
    assert [event.reason for event in events_between(gone, back)] == ["Reconciled"]
    assert status_of(empty, EMPTY, AT).gone == (), "a new GpuNode has listed none"


def test_a_function_that_is_no_gpu_may_disappear() -> None:
    before = status_of(picture(), EMPTY, AT)
    (gpu,) = before.gpus
    function = replace(gpu, address="0000:65:00.4", planning=None)
    assert status_of(picture(), replace(EMPTY, status=replace(before, gpus=(gpu, function))), AT).gone == ()


@pytest.mark.parametrize(
    ("pod", "vm"),
    [
        ("virt-launcher-vm-a-x7k2p", "default/vm-a"),
        ("virt-launcher-vm", None),
        ("box", None),
        (None, None),
    ],
)
def test_the_vm_of_a_launcher_pod_is_named(pod: str | None, vm: str | None) -> None:
    assert Consumer(PodUid("1"), "default", pod).vm == vm


def test_a_gpunode_lists_the_vms_that_use_a_gpu_or_a_vgpu() -> None:
    vgpu = VgpuView(
        VGPU, "NVIDIA A10-4Q", GPU, A10_4Q, users=("pod default/virt-launcher-b-x7k2p",), vms=("default/b",)
    )
    gpu = GpuView(
        GPU, "10de:2236", "gpu", None, Mode.VGPU, "nvidia", None, 0, None, None, vgpus=(vgpu,), vms=("default/a",)
    )
    (found,) = status_of(NodeView(AT, (gpu,)), EMPTY, AT).gpus
    assert (found.virtual_machines, found.vgpus[0].virtual_machines) == (("default/a",), ("default/b",))
