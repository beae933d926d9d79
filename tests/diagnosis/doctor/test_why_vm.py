"""Why a VM, a VMI or a pod lacks its GPUs: each possible obstacle, and the blocker that is named."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuvirt.cli.diagnosis.why import show_vm
from gpuvirt.diagnosis.explanation import StageOutcome
from gpuvirt.diagnosis.target import object_target
from gpuvirt.diagnosis.vms.vmevidence import (
    DeviceSeen,
    GpuNodeSeen,
    NodeSeen,
    ObjectKind,
    ObjectRef,
    PodSeen,
    VmEvidence,
    node_seen,
)
from gpuvirt.diagnosis.vms.vmexplanation import Explanation, VmStageName, explain
from gpuvirt.diagnosis.vms.vmfindings import refusal_in
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds import core
from gpuvirt.kube.kinds.core import Condition, OwnedMetadata, Placement, Taint, Toleration
from gpuvirt.kube.kinds.gpunode import GpuNode, Offered
from gpuvirt.kube.kinds.kubevirt import (
    Device,
    Devices,
    Domain,
    Template,
    Vm,
    Vmi,
    VmiSpec,
    VmiStatus,
    VmSpec,
    VmStatus,
)
from gpuvirt.model.kubevirt.kubevirt import KubeVirt, parse
from gpuvirt.model.offers.ondemand.typesannotation import VGPU_TYPES_ANNOTATION
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen
from gpuvirt.model.reasons.codes import Code
from gpuvirt.model.workers.away import AwayWorker, NodePhase, PhaseConfig
from gpuvirt.model.workers.spec import SAVED_STRATEGY, PhaseName

A10, QUARTER = "nvidia.com/GA102GL_A10", "nvidia.com/NVIDIA_A10-4Q"
GPU, OTHER = "0000:65:00.0", "0000:ca:00.0"
NONE, ONE_GPU = Devices(), Devices(gpus=(Device(A10),))
PENDING = "0/2 nodes are available: 2 Insufficient nvidia.com/GA102GL_A10."
UNSCHEDULABLE = Condition("PodScheduled", "False", "Unschedulable", PENDING)
REFUSED = Reason(
    ReasonCode.IN_USE_ELSEWHERE,
    GPU,
    "is open in qemu (pid 7), which is of no pod",
    (Seen("", "/proc/7/fd"),),
    "stop that VM",
)
NO_START = (
    "CreateContainerConfigError: device plugin PreStartContainer rpc failed with err: rpc error: code ="
    " FailedPrecondition desc = nvidia.com/vgpu: LimitNotPossible: libvgpu.so can't be used: it is missing; fix:"
    " install the library"
)
OFFER = Offered(name=A10, healthy=2, registered=True, pci_vendor_selectors=("10DE:2236",))
GPUS = (DeviceSeen(GPU, "GA102GL [A10]", A10), DeviceSeen(OTHER, "GA102GL [A10]", A10))
NODE = NodeSeen("node01", allocatable={A10: 2}, gpu_node=GpuNodeSeen((OFFER,), GPUS))
PLAIN = NodeSeen("node02")
OTHER_TYPE = NodeSeen("node03", gpu_node=GpuNodeSeen((Offered(name=QUARTER, healthy=1, registered=True),)))
LAUNCHER = "virt-launcher-vm-a-x7k2p"
POD = PodSeen(LAUNCHER, "team", "Pending", requests={A10: 1, "devices.kubevirt.io/kvm": 1}, vm="vm-a")
WAITS = replace(POD, conditions=(UNSCHEDULABLE,))
RUNS = replace(POD, phase="Running", node="node01", conditions=(Condition("PodScheduled", "True"),))
OWNER = RUNS.user


def vmi_of(phase: str, node: str = "", devices: Devices = NONE, *, conditions: tuple[Condition, ...] = ()) -> Vmi:
    return Vmi(
        metadata=OwnedMetadata(),
        spec=VmiSpec(domain=Domain(devices)),
        status=VmiStatus(phase, node, conditions=conditions),
    )


def vm_of(
    strategy: str,
    status: str = "",
    *,
    running: bool | None = None,
    saved: str = "",
    devices: Devices = NONE,
    conditions: tuple[Condition, ...] = (),
) -> Vm:
    return Vm(
        metadata=OwnedMetadata(annotations={SAVED_STRATEGY: saved} if saved else {}),
        spec=VmSpec(running=running, run_strategy=strategy, template=Template(spec=VmiSpec(domain=Domain(devices)))),
        status=VmStatus(status, conditions=conditions),
    )


STARTED = VmEvidence(
    target=ObjectRef(ObjectKind.VM, "vm-a", "team"),
    vm=vm_of("Always", "Starting", devices=ONE_GPU),
    vmi=vmi_of("Scheduling", devices=ONE_GPU),
    pod=WAITS,
    nodes=(NODE, PLAIN),
)
RUNNING = replace(STARTED, vmi=vmi_of("Running", "node01", ONE_GPU), pod=RUNS)


def kubevirt(configuration: str) -> tuple[KubeVirt, ...]:
    return parse(f"{{kind: KubeVirt, spec: {{configuration: {configuration}}}}}", where="kv")


def stopped(vm: Vm, *kubevirts: KubeVirt) -> VmEvidence:
    return replace(STARTED, vm=vm, vmi=None, pod=None, kubevirts=kubevirts)


def without_pod(configuration: str, *reported: Condition) -> VmEvidence:
    vmi = vmi_of("Pending", devices=ONE_GPU, conditions=reported)
    return replace(STARTED, vmi=vmi, pod=None, kubevirts=kubevirt(configuration))


def on_node(node: NodeSeen, pod: PodSeen = WAITS, *others: PodSeen) -> VmEvidence:
    return replace(STARTED, nodes=(node, PLAIN), pod=pod, pods=(pod, *others))


SUSPENDED = AwayWorker("gpus", "is suspended until 2026-01-06 07:00 CET by schedule gpus", "gpuvirt")


def at_night(*away: str, selector: str = "v100-4q") -> VmEvidence:
    """A pod that needs a worker of the day, two of which are suspended as Kubernetes shows it."""
    day, night = {"vgpu.type": "v100-4q"}, {"vgpu.type": "v100-16q"}
    taints = (
        Taint("node.kubernetes.io/unreachable", "NoExecute"),
        Taint("node.kubernetes.io/unschedulable", "NoSchedule"),
    )
    gone = replace(NODE, ready=False, unschedulable=True, taints=taints, labels=day)
    pod = replace(WAITS, placement=Placement({"vgpu.type": selector}))
    nodes = (
        replace(gone, name="worker-1"),
        replace(gone, name="worker-2"),
        replace(NODE, name="worker-5", labels=night),
    )
    return replace(STARTED, nodes=nodes, pod=pod, pods=(pod,), away={NodeName(name): SUSPENDED for name in away})


def test_a_pod_that_waits_for_another_phase_is_told_until_when() -> None:
    found = explain(at_night("worker-1", "worker-2"))
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.WORKER_AWAY
    assert found.blocker.message == (
        "waits for another phase: its workers are suspended until 2026-01-06 07:00 CET by schedule gpus"
        " (worker-1, worker-2)"
    )
    assert found.blocker.fix == ("gpuvirt schedule show gpus -n gpuvirt",)
    assert [verdict.obstacle.code for verdict in found.nodes if verdict.obstacle is not None] == [
        FindingCode.WORKER_AWAY,
        FindingCode.WORKER_AWAY,
        FindingCode.NODE_SELECTOR_MISMATCH,
    ]


def test_a_pod_that_waits_for_a_vgpu_config_of_another_phase_is_told_until_when() -> None:
    night = PhaseConfig("gpus", "gpuvirt", PhaseName("night"), "A10-4Q", frozenset({"A10-4Q"}))
    coming = NodePhase(night, "gets the vGPU config A10-4Q at 2026-01-05 20:00 CET by schedule gpus", is_current=False)
    pod = replace(WAITS, requests={QUARTER: 1})
    evidence = replace(
        STARTED,
        target=ObjectRef(ObjectKind.POD, LAUNCHER, "team"),
        vm=None,
        vmi=None,
        pod=pod,
        pods=(pod,),
        nodes=(NODE,),
        phases={NodeName("node01"): (coming,)},
    )
    found = explain(evidence).blocker
    assert found is not None
    assert found.code is FindingCode.OTHER_PHASE
    assert "gets the vGPU config A10-4Q at 2026-01-05 20:00 CET by schedule gpus" in found.message
    assert found.fix == ("gpuvirt schedule show gpus -n gpuvirt",)
    other = replace(coming, config=replace(night, types=frozenset({"A10-24Q"})))
    not_offered = explain(replace(evidence, phases={NodeName("node01"): (other,)})).blocker
    assert not_offered is not None
    assert not_offered.code is not FindingCode.OTHER_PHASE, "no phase brings the requested type"


def test_a_pod_without_devices_that_selects_workers_is_told_until_when() -> None:
    def blocked(*away: str) -> Code | None:
        evidence = at_night(*away)
        assert evidence.pod is not None
        target = ObjectRef(ObjectKind.POD, LAUNCHER, "team")
        pod = replace(evidence.pod, requests={})
        blocker = explain(replace(evidence, target=target, vm=None, vmi=None, pod=pod)).blocker
        return blocker.code if blocker is not None else None

    assert blocked("worker-1", "worker-2") is FindingCode.WORKER_AWAY
    assert blocked("worker-1") is FindingCode.NO_DEVICE_REQUESTED, "worker-2 is not away by a schedule"
    assert blocked() is FindingCode.NO_DEVICE_REQUESTED


def test_a_worker_that_is_not_ready_without_a_schedule_is_not_away() -> None:
    codes = [verdict.obstacle.code for verdict in explain(at_night("worker-1")).nodes if verdict.obstacle is not None]
    assert codes == [FindingCode.WORKER_AWAY, FindingCode.NODE_SELECTOR_MISMATCH, FindingCode.NODE_NOT_READY]
    assert "its worker is suspended" in explained(at_night("worker-1"))


def test_a_pod_for_the_worker_of_now_does_not_wait_for_the_others() -> None:
    assert explain(at_night("worker-1", "worker-2", selector="v100-16q")).nodes[0].obstacle is None


def explained(evidence: VmEvidence) -> str:
    blocker = explain(evidence).blocker
    return blocker.message if blocker is not None else ""


def failed(reason: str, message: str) -> VmEvidence:
    return replace(STARTED, pod=replace(POD, phase="Failed", node="node01", reason=reason, message=message))


def allocated_to(name: str, count: int) -> PodSeen:
    return PodSeen(name, "other", "Running", "node01", requests={A10: count})


def reporting(*offers: Offered, devices: tuple[DeviceSeen, ...] = (), counted: int = 0, withheld: str = "") -> NodeSeen:
    agent = GpuNodeSeen(offers, devices, {A10: withheld} if withheld else {})
    return NodeSeen("node01", allocatable={A10: counted}, gpu_node=agent)


def node_on_demand(*, both: bool = False) -> NodeSeen:
    """Return a node in mode on-demand, one of whose two GPUs carries the 12Q of a VM, or both do."""
    types = [{"name": "NVIDIA A10-12Q", "creatable": 31}, {"name": "NVIDIA A10-4Q", "creatable": 31}]
    planning = {"pciId": "10de:2236", "classCode": 0x030200, "framework": "mdev", "parents": 32, "types": types}
    used = {"id": "v1", "type": "NVIDIA A10-12Q", "users": ["pod prod/virt-launcher-vm-z-x2x4c"]}
    gpu = {"address": GPU, "mode": "vgpu", "desiredMode": "on-demand", "planning": planning}
    more = {"vgpus": [{**used, "id": "v2", "users": ["pod prod/a", "pod prod/b"]}]} if both else {}
    offer = {"name": QUARTER, "healthy": 0 if both else 1, "registered": True}
    status = {"gpus": [{**gpu, "vgpus": [used]}, {**gpu, "address": OTHER, **more}], "resources": [offer]}
    annotations = {VGPU_TYPES_ANNOTATION: f'{{"{QUARTER}": "NVIDIA A10-4Q"}}'}
    node = {
        "metadata": {"name": "node01", "annotations": annotations},
        "status": {"allocatable": {QUARTER: "0" if both else "1"}},
    }
    gpu_node = msgspec.convert({"metadata": {"name": "node01"}, "status": status}, GpuNode)
    return node_seen(msgspec.convert(node, core.Node), gpu_node)


def selecting(**labels: str) -> PodSeen:
    return replace(
        WAITS, placement=Placement(node_selector={key.replace("_", "/"): value for key, value in labels.items()})
    )


ILL = (replace(GPUS[0], reasons=(f"FellOffBus: {GPU} no longer answers",)), GPUS[1])
NO_ENTRY = Condition(
    "Synchronized",
    "False",
    "FailedCreate",
    f"failed to render launch manifest: GPU {A10} is not permitted in permittedHostDevices configuration",
)
HOST_DEVICE = Devices(host_devices=(Device(A10),))
GATE_REFUSED = Condition("Failure", "True", "FailedCreate", "Host Devices feature gate is not enabled")
CHANGED = Condition("RestartRequired", "True", message="a non-live-updatable field was changed")
MISSING = replace(STARTED, vm=None, vmi=None, pod=None)
FOREIGN = "ForeignProvider: KubeVirt offers it itself"

CASES = {
    "no such VM": (
        replace(MISSING, neighbours=("vm-b", "db")),
        (VmStageName.FOUND, FindingCode.NO_SUCH_OBJECT, "gpuvirt why vm/vm-b -n team"),
    ),
    "in another namespace": (
        replace(MISSING, namespaces=("prod",)),
        (VmStageName.FOUND, FindingCode.NO_SUCH_OBJECT, "gpuvirt why vm/vm-a -n prod"),
    ),
    "no KubeVirt": (
        replace(MISSING, kubevirt_installed=False),
        (VmStageName.FOUND, FindingCode.KUBEVIRT_NOT_INSTALLED, "gpuvirt why pod/NAME"),
    ),
    "no request": (
        stopped(vm_of("Halted", "Stopped")),
        (VmStageName.REQUESTS, FindingCode.NO_DEVICE_REQUESTED, f"deviceName: {A10}"),
    ),
    "requested since it was started": (
        replace(
            RUNNING,
            vm=vm_of("Always", "Running", devices=ONE_GPU, conditions=(CHANGED,)),
            pod=replace(RUNS, requests={}),
        ),
        (VmStageName.REQUESTS, FindingCode.RESTART_REQUIRED, "virtctl restart vm-a -n team"),
    ),
    "halted": (
        stopped(vm_of("Halted", "Stopped", devices=ONE_GPU)),
        (VmStageName.STARTED, FindingCode.VM_STOPPED, "virtctl start vm-a -n team"),
    ),
    "running: false": (
        stopped(vm_of("", "Stopped", running=False, devices=ONE_GPU)),
        (VmStageName.STARTED, FindingCode.VM_STOPPED, '{"spec":{"running":true}}'),
    ),
    "manual": (
        stopped(vm_of("Manual", "Stopped", devices=ONE_GPU)),
        (VmStageName.STARTED, FindingCode.VM_STOPPED, "virtctl start"),
    ),
    "no VMI yet": (
        stopped(vm_of("Always", "Provisioning", devices=ONE_GPU)),
        (VmStageName.STARTED, FindingCode.VM_NOT_STARTED, "virt-controller"),
    ),
    "gate refused at the webhook": (
        stopped(vm_of("Always", devices=HOST_DEVICE, conditions=(GATE_REFUSED,)), *kubevirt("{}")),
        (VmStageName.STARTED, FindingCode.FEATURE_GATE_MISSING, "- HostDevices"),
    ),
    "another failure": (
        stopped(vm_of("Always", devices=ONE_GPU, conditions=(replace(GATE_REFUSED, message="no PVC"),))),
        (VmStageName.STARTED, FindingCode.VM_NOT_STARTED, "kubectl describe vm vm-a -n team"),
    ),
    "not permitted": (
        without_pod("{permittedHostDevices: {}}", NO_ENTRY),
        (VmStageName.PERMITTED, FindingCode.NOT_PERMITTED, 'pciVendorSelector: "10DE:2236"'),
    ),
    "not permitted, and offered by no node": (
        replace(without_pod("{permittedHostDevices: {}}", NO_ENTRY), nodes=(OTHER_TYPE,)),
        (VmStageName.PERMITTED, FindingCode.NOT_PERMITTED, f"no node offers it, only {QUARTER}"),
    ),
    "not permitted by what its VMI says": (
        replace(without_pod("{}", NO_ENTRY), kubevirts=None),
        (VmStageName.PERMITTED, FindingCode.NOT_PERMITTED, "externalResourceProvider: true"),
    ),
    "no pod": (
        without_pod("{}", replace(NO_ENTRY, message="exceeded quota")),
        (VmStageName.POD, ReasonCode.POD_MISSING, "kubectl describe vmi vm-a -n team"),
    ),
    "pods that may not be read": (
        replace(without_pod("{}"), pod_unread=True, unread=("list pods: the API server answers 403",)),
        (VmStageName.POD, FindingCode.NOT_READ, "may list pods"),
    ),
    "gated": (
        on_node(NODE, replace(WAITS, gates=("example.org/wait",))),
        (VmStageName.SCHEDULED, FindingCode.UNSCHEDULABLE, "gate"),
    ),
    "offered by no node": (
        replace(STARTED, pod=replace(WAITS, requests={"nvidia.com/GA102_A10": 1})),
        (VmStageName.SCHEDULED, FindingCode.NO_SUCH_RESOURCE, f"deviceName: {A10}"),
    ),
    "another size is no slip": (
        replace(STARTED, pod=replace(WAITS, requests={"nvidia.com/GA102GL_A16": 1})),
        (VmStageName.SCHEDULED, FindingCode.NO_SUCH_RESOURCE, "gpuvirt status"),
    ),
    "offered nowhere at all": (
        replace(STARTED, nodes=(PLAIN,)),
        (VmStageName.SCHEDULED, FindingCode.NO_SUCH_RESOURCE, "gpuvirt status"),
    ),
    "withheld": (
        on_node(reporting(devices=GPUS, withheld=FOREIGN)),
        (VmStageName.SCHEDULED, ReasonCode.FOREIGN_PROVIDER, "gpunode node01"),
    ),
    "not registered": (
        on_node(reporting(replace(OFFER, registered=False), devices=GPUS)),
        (VmStageName.SCHEDULED, FindingCode.NOT_COUNTED, "gpuvirt doctor"),
    ),
    "unhealthy": (
        on_node(reporting(replace(OFFER, healthy=0), devices=ILL[:1])),
        (VmStageName.SCHEDULED, ReasonCode.FELL_OFF_BUS, f"gpuvirt why {GPU}"),
    ),
    "too few, and those unhealthy": (
        on_node(reporting(replace(OFFER, healthy=0), devices=ILL[:1]), replace(WAITS, requests={A10: 2})),
        (VmStageName.SCHEDULED, FindingCode.TOO_FEW_DEVICES, f"gpuvirt why {GPU}, on node01"),
    ),
    "too few": (
        on_node(NODE, replace(WAITS, requests={A10: 3})),
        (VmStageName.SCHEDULED, FindingCode.TOO_FEW_DEVICES, "request at most 2"),
    ),
    "another type on demand": (
        on_node(node_on_demand(), replace(WAITS, requests={QUARTER: 2})),
        (VmStageName.SCHEDULED, FindingCode.ALL_ALLOCATED, "it fits when VM prod/vm-z ends"),
    ),
    "too few, also without the other type": (
        on_node(node_on_demand(), replace(WAITS, requests={QUARTER: 3})),
        (VmStageName.SCHEDULED, FindingCode.TOO_FEW_DEVICES, "request at most 1"),
    ),
    "all allocated": (
        on_node(NODE, WAITS, allocated_to("a", 1), allocated_to("b", 1)),
        (VmStageName.SCHEDULED, FindingCode.ALL_ALLOCATED, "stop a VM or pod"),
    ),
    "not ready": (
        on_node(replace(NODE, ready=False)),
        (VmStageName.SCHEDULED, FindingCode.NODE_NOT_READY, "kubectl describe node node01"),
    ),
    "cordoned": (
        on_node(replace(NODE, unschedulable=True)),
        (VmStageName.SCHEDULED, FindingCode.NODE_CORDONED, "kubectl uncordon node01"),
    ),
    "not selected": (
        on_node(NODE, selecting(zone="a")),
        (VmStageName.SCHEDULED, FindingCode.NODE_SELECTOR_MISMATCH, "kubectl label node node01 zone=a"),
    ),
    "without Kata": (
        on_node(NODE, selecting(**{"katacontainers.io_kata-runtime": "true"})),
        (VmStageName.SCHEDULED, FindingCode.NODE_SELECTOR_MISMATCH, "install kata-deploy on node01, which sets this"),
    ),
    "without virt-handler": (
        on_node(NODE, selecting(**{"kubevirt.io_schedulable": "true"})),
        (VmStageName.SCHEDULED, FindingCode.NODE_SELECTOR_MISMATCH, "virt-handler"),
    ),
    "tainted": (
        on_node(replace(NODE, taints=(Taint("gpu", "NoSchedule", "yes"),))),
        (VmStageName.SCHEDULED, FindingCode.TAINT_NOT_TOLERATED, "- {key: gpu, operator: Equal, value: yes, effect: "),
    ),
    "memory": (
        on_node(NODE, replace(WAITS, conditions=(replace(UNSCHEDULABLE, message="1 Insufficient memory."),))),
        (VmStageName.SCHEDULED, FindingCode.UNSCHEDULABLE, "request less memory"),
    ),
    "refused by our plugin": (
        failed(
            "UnexpectedAdmissionError",
            f"Pod was rejected: Allocate failed due to rpc error: code = FailedPrecondition desc = {A10}:"
            f" {REFUSED.text}, which is unexpected",
        ),
        (VmStageName.ADMITTED, ReasonCode.IN_USE_ELSEWHERE, "stop that VM"),
    ),
    "refused by the kubelet": (
        failed("TopologyAffinityError", "Resources cannot be allocated with Topology locality"),
        (VmStageName.ADMITTED, FindingCode.ADMISSION_REFUSED, "gpuvirt doctor on node01"),
    ),
    "no image": (
        replace(RUNNING, pod=replace(RUNS, phase="Pending", waiting="ErrImagePull: not found"), vmi=None),
        (VmStageName.RUNNING, FindingCode.POD_NOT_RUNNING, f"kubectl describe pod {LAUNCHER} -n team"),
    ),
    "refused at a container's start": (
        replace(RUNNING, pod=replace(RUNS, phase="Pending", waiting=NO_START), vmi=None),
        (VmStageName.RUNNING, ReasonCode.LIMIT_NOT_POSSIBLE, "install the library"),
    ),
    "crashed": (
        replace(RUNNING, pod=replace(RUNS, waiting="CrashLoopBackOff: back-off 5m0s restarting failed container")),
        (VmStageName.RUNNING, FindingCode.POD_NOT_RUNNING, f"kubectl logs {LAUNCHER} -n team --all-containers --prev"),
    ),
    "crashed since its device has failed": (
        replace(
            RUNNING,
            pod=replace(RUNS, waiting="CrashLoopBackOff: back-off 5m0s restarting failed container"),
            nodes=(reporting(OFFER, devices=(replace(ILL[0], users=(OWNER,)), ILL[1]), counted=1),),
        ),
        (VmStageName.RUNNING, ReasonCode.FELL_OFF_BUS, f"gpuvirt why {GPU}"),
    ),
    "no guest": (
        replace(RUNNING, vmi=vmi_of("Scheduled", "node01", ONE_GPU, conditions=(NO_ENTRY,))),
        (VmStageName.RUNNING, FindingCode.POD_NOT_RUNNING, "kubectl logs"),
    ),
    "ended": (
        replace(RUNNING, pod=replace(RUNS, phase="Succeeded"), vmi=vmi_of("Succeeded", "node01", ONE_GPU)),
        (VmStageName.RUNNING, FindingCode.POD_NOT_RUNNING, "kubectl logs"),
    ),
    "a device that has failed": (
        replace(RUNNING, nodes=(reporting(OFFER, devices=(replace(ILL[0], users=(OWNER,)), ILL[1]), counted=1),)),
        (VmStageName.RUNNING, ReasonCode.FELL_OFF_BUS, f"gpuvirt why {GPU}"),
    ),
}  # fmt: skip


def test_a_device_that_leaves_once_its_pod_has_ended_blocks_nothing() -> None:
    withdrawn = replace(ILL[0], users=(OWNER,), reasons=("Withdrawn: is being returned to the host's driver",))
    found = explain(replace(RUNNING, nodes=(reporting(OFFER, devices=(withdrawn, ILL[1]), counted=1),)))
    assert found.blocker is None
    assert "waits until it ends" in found.stages[-1].message


def blocked_at(found: Explanation) -> VmStageName | None:
    return next((stage.step for stage in found.stages if stage.standing is StageOutcome.BLOCKED), None)


@pytest.mark.parametrize("case", CASES)
def test_the_blocker_of_a_vm_is_named_at_its_step(case: str) -> None:
    evidence, (step, code, fix) = CASES[case]
    found = explain(evidence)
    assert found.blocker is not None
    assert (blocked_at(found), found.blocker.code) == (step, code)
    assert fix in "\n".join(found.blocker.fix)
    assert found.blocker.seen
    assert [stage.step for stage in found.stages] == list(VmStageName)


@pytest.mark.parametrize("case", CASES)
def test_the_blocker_is_shown_first_and_fits(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = explain(CASES[case][0])
    show_vm(found)
    lines = capsys.readouterr().out.splitlines()
    assert found.blocker is not None
    assert lines[0].startswith("vm team/vm-a")
    assert lines[2] == "Blocked by:"
    assert str(found.blocker.code) in lines[3]
    assert all(len(line) <= 80 or line.startswith(" " * 9) for line in lines)


def test_each_gpu_that_carries_another_size_on_demand_is_counted() -> None:
    found = explain(on_node(node_on_demand(both=True), replace(WAITS, requests={QUARTER: 1}))).blocker
    assert found is not None
    assert "2 GPUs in mode on-demand carry vGPUs of another size" in found.message
    assert [place.path for place in found.seen][:2] == [GPU, OTHER]
    assert found.fix == ("it fits when VM prod/vm-z ends, or the users of another of these GPUs",)


def test_a_pod_is_told_to_request_the_resource_that_it_means() -> None:
    target, asks = ObjectRef(ObjectKind.POD, LAUNCHER, "team"), replace(WAITS, requests={"nvidia.com/GA102_A10": 1})
    found = explain(replace(STARTED, target=target, pod=asks))
    assert found.blocker is not None
    assert found.blocker.fix == (f"resources.limits: {A10}",)


def test_a_scheduler_that_has_not_answered_is_named() -> None:
    found = explain(replace(STARTED, pod=replace(WAITS, scheduler="gpuvirt-sched", conditions=())))
    assert found.blocker is not None
    assert "'gpuvirt-sched'; gpuvirt's is gpuvirt-scheduler" in found.blocker.fix[0]


def test_each_node_has_its_obstacle_and_the_nearest_fit_is_first() -> None:
    full, cordoned = replace(NODE, name="full"), replace(NODE, name="cordoned", unschedulable=True)
    foreign = NodeSeen("foreign", gpu_node=GpuNodeSeen((replace(OFFER, name=QUARTER),)))
    takes = replace(allocated_to("a", 2), node="full", vm="big")
    found = explain(replace(STARTED, nodes=(PLAIN, foreign, full, cordoned), pods=(WAITS, takes)))
    assert [(node.node, node.free, node.obstacle and node.obstacle.code) for node in found.nodes] == [
        ("cordoned", {A10: 2}, FindingCode.NODE_CORDONED),
        ("full", {A10: 0}, FindingCode.ALL_ALLOCATED),
        ("foreign", {A10: 0}, FindingCode.NO_SUCH_RESOURCE),
    ]
    assert found.nodes[1].obstacle is not None
    assert found.nodes[1].obstacle.seen[0].value == "vm other/big"
    assert found.blocker is not None
    assert found.blocker.subject == "cordoned"
    assert found.blocker.seen[-1].value == f"Unschedulable: {PENDING}"
    assert found.scheduler == f"Unschedulable: {PENDING}"


@pytest.mark.parametrize("strategy", ["Halted", "Manual", "RerunOnFailure"])
def test_a_vm_that_a_schedule_has_stopped_is_not_to_be_started(strategy: str) -> None:
    message = "is stopped until 2026-01-06 07:00 CET by schedule gpus"
    vm = vm_of(strategy, "Stopped", saved="Always" if strategy == "Halted" else "", devices=ONE_GPU)
    found = explain(replace(stopped(vm), stopped=AwayWorker("gpus", message, "gpuvirt"))).blocker
    assert found is not None
    assert (found.code, found.message, found.fix) == (
        FindingCode.VM_STOPPED,
        message,
        ("gpuvirt schedule show gpus -n gpuvirt",),
    )


def test_a_vm_that_a_schedule_has_stopped_which_may_not_be_read_has_its_strategy_in_an_annotation() -> None:
    found = explain(stopped(vm_of("Halted", "Stopped", saved="Always", devices=ONE_GPU))).blocker
    assert found is not None
    assert (found.code, found.seen[0].value) == (FindingCode.VM_STOPPED, "Always")
    assert "is stopped by a VgpuSchedule" in found.message


def test_nodes_that_could_run_a_stopped_vm_are_listed() -> None:
    found = explain(stopped(vm_of("Halted", "Stopped", devices=ONE_GPU)))
    assert [(node.node, node.obstacle) for node in found.nodes] == [("node01", None)]


def test_a_running_vm_lists_its_devices() -> None:
    mine = (replace(GPUS[0], users=(OWNER,)), replace(GPUS[1], users=("pod team/other",)))
    found = explain(replace(RUNNING, nodes=(reporting(OFFER, devices=mine, counted=2),)))
    assert (found.blocker, found.nodes, blocked_at(found)) == (None, (), None)
    assert [(device.id, device.node, device.resource) for device in found.devices] == [(GPU, "node01", A10)]
    assert found.stages[-1].message == f"it runs with {GPU} (GA102GL [A10])"


@pytest.mark.parametrize("pod", [WAITS, RUNS])
def test_a_pod_needs_no_kubevirt(pod: PodSeen) -> None:
    target = ObjectRef(ObjectKind.POD, LAUNCHER, "team")
    found = explain(VmEvidence(target=target, pod=pod, nodes=(replace(NODE, unschedulable=True),)))
    skipped = {stage.step for stage in found.stages if stage.standing is StageOutcome.SKIPPED}
    assert {VmStageName.STARTED, VmStageName.PERMITTED} <= skipped
    assert (found.blocker is None) == (pod is RUNS)


def test_forbidden_objects_are_unknown_and_not_absent() -> None:
    unread = "list nodes: the API server answers 403"
    found = explain(replace(STARTED, nodes=None, pods=None, kubevirts=None, unread=(unread,)))
    assert found.blocker is not None
    assert (found.blocker.code, found.blocker.message) == (FindingCode.UNSCHEDULABLE, "has no node yet")
    assert found.unread == (unread,)
    alone = explain(replace(STARTED, pods=None))
    assert [(node.node, node.free, node.obstacle) for node in alone.nodes] == [("node01", None, None)]
    waits = explain(replace(without_pod("{}"), kubevirts=None))
    assert [stage.standing for stage in waits.stages if stage.step is VmStageName.PERMITTED] == [StageOutcome.SKIPPED]


@pytest.mark.parametrize("code", ReasonCode)
def test_gpuvirts_refusals_are_found_in_kubelet_messages(code: ReasonCode) -> None:
    reason = replace(REFUSED, code=code)
    reported = (
        f"Allocate failed due to rpc error: code = FailedPrecondition desc = {A10}: {reason.text}, which is unexpected"
    )
    assert refusal_in(reported) == reason
    assert refusal_in("Allocate failed due to rpc error: code = Unavailable desc = connection refused") is None


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (Toleration(operator="Exists"), True),
        (Toleration("gpu", "Exists"), True),
        (Toleration("gpu", value="yes"), True),
        (Toleration("gpu", value="no"), False),
        (Toleration("gpu", "Exists", effect="NoExecute"), False),
        (Toleration("other", "Exists"), False),
    ],
)
def test_tolerations_match_taints(toleration: Toleration, *, tolerated: bool) -> None:
    placement = Placement(tolerations=(toleration,))
    assert (placement.untolerated([Taint("gpu", "NoSchedule", "yes")]) is None) == tolerated
    assert placement.untolerated([Taint("gpu", "PreferNoSchedule")]) is None


@given(st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4))
def test_the_order_of_nodes_and_pods_does_not_matter(cases: list[str]) -> None:
    nodes = [
        replace(node, name=f"node{at}-{node.name}")
        for at, case in enumerate(cases)
        for node in CASES[case][0].nodes or ()
    ]
    pods = tuple(pod for case in cases for pod in CASES[case][0].pods or ())
    found = [explain(replace(STARTED, nodes=tuple(each), pods=pods)) for each in (nodes, nodes[::-1])]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vm/vm-a", (ObjectKind.VM, "vm-a")),
        ("vmis/a.b", (ObjectKind.VMI, "a.b")),
        ("po/x", (ObjectKind.POD, "x")),
        (A10, None),
        ("GA102GL_A10", None),
        (GPU, None),
    ],
)
def test_targets_are_parsed(text: str, expected: tuple[ObjectKind, str] | None) -> None:
    assert object_target(text) == expected


@pytest.mark.parametrize("text", ["vm/", "pod/A", "vm/a/b", "vmi/../x"])
def test_names_that_no_object_can_have_are_refused(text: str) -> None:
    with pytest.raises(InvalidIdError):
        object_target(text)
