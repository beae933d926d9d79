"""`gpuvirt why pod/NAME` names the GPUs that are too full for a share, and the pods whose end makes room."""

from collections.abc import Mapping
from io import StringIO

import pytest
from rich.console import Console

from gpuvirt.cli.output.diagnosisrender import print_finding
from gpuvirt.diagnosis.explanation import StageOutcome
from gpuvirt.diagnosis.findings import problem
from gpuvirt.diagnosis.vms.vmevidence import GpuNodeSeen, NodeSeen, ObjectKind, ObjectRef, PodSeen, VmEvidence
from gpuvirt.diagnosis.vms.vmexplanation import Explanation, VmStageName, explain
from gpuvirt.diagnosis.vms.vmshares import SharesSeen
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.kube.kinds.core import Condition
from gpuvirt.model.reasons import FindingCode, Reason, ReasonCode, Seen
from gpuvirt.model.shares.demand import ContainerDemand, ContainerKind, ContainerName, Units, demand_of
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.overview import PodShare
from gpuvirt.model.shares.placement import GpuId

VGPU = "nvidia.com/vgpu"
PENDING = Condition("PodScheduled", "False", "Unschedulable", "0/1 nodes are available")


def usage_of(
    capacity: Mapping[str, int], pods: Mapping[str, Mapping[str, int]], priorities: Mapping[str, int] | None = None
) -> NodeUsage:
    usage = NodeUsage()
    usage = usage.with_capacity({GpuId(gpu): Units(units) for gpu, units in capacity.items()})
    for name, used in pods.items():
        shares = {GpuId(gpu): Units(units) for gpu, units in used.items()}
        usage = usage.with_pod(PodUid(name), shares, Units(sum(used.values())), (priorities or {}).get(name, 0))
    return usage


def explained(
    requested: int,
    capacity: Mapping[str, int],
    pods: Mapping[str, Mapping[str, int]],
    *,
    priority: int = 0,
    priorities: Mapping[str, int] | None = None,
    containers: int = 1,
    labels: Mapping[str, str] | None = None,
    counted: int | None = None,
    **known: object,
) -> Explanation:
    """Explain a pending pod on one node, whose GPUs have the units of `capacity`, with these pods on them.

    `counted`: the units that the kubelet counts, where they are others.
    """
    usage = usage_of(capacity, pods, priorities)
    names_of_containers = [ContainerName(f"c{number}") for number in range(containers)]
    demand = demand_of([ContainerDemand(name, ContainerKind.APP, Units(requested)) for name in names_of_containers])
    running = [
        PodSeen(name, "ml", "Running", "node01", requests={VGPU: sum(used.values())}) for name, used in pods.items()
    ]
    allocatable = {VGPU: sum(capacity.values()) if counted is None else counted}
    names = {PodUid(name): PodShare(f"ml/{name}", sum(used.values())) for name, used in pods.items()}
    return explain(
        VmEvidence(
            target=ObjectRef(ObjectKind.POD, "new", "ml"),
            pod=PodSeen("new", "ml", "Pending", requests={VGPU: demand.total}, conditions=(PENDING,)),
            nodes=(NodeSeen("node01", labels=labels or {}, allocatable=allocatable, gpu_node=GpuNodeSeen()),),
            pods=tuple(running),
            shares=SharesSeen(VGPU, demand, nodes={NodeName("node01"): usage}, pods=names, priority=priority, **known),  # type: ignore[arg-type]
        )
    )


@pytest.mark.parametrize(
    ("labels", "is_upgrading"),
    [
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-required"}, True),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-failed"}, True),
        ({"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"}, True),
        ({"nvidia.com/gpu-driver-upgrade-state": "upgrade-done", "nvidia.com/gpu.deploy.client": "true"}, False),
        ({}, False),
    ],
)
def test_an_upgrade_of_the_driver_is_the_reason_with_the_pods_that_hold_it(
    labels: dict[str, str], is_upgrading: bool
) -> None:
    found = explained(300, {"GPU-a": 0 if is_upgrading else 1000}, {"train": {"GPU-a": 500}}, labels=labels)
    assert found.blocker is not None
    assert (found.blocker.code is ReasonCode.DRIVER_UPGRADE) is is_upgrading
    if is_upgrading:
        (key, value) = next(iter(labels.items()))
        assert [seen.value for seen in found.blocker.seen[:2]] == [f"{key}={value}", "ml/train"]


def test_a_node_whose_shares_are_no_limits_is_named_where_the_pod_requires_limits() -> None:
    found = explained(300, {"GPU-a": 1000}, {}, requires_limits=True)
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.SHARES_NOT_ENFORCED
    assert [str(seen.path) for seen in found.blocker.seen[:2]] == [
        "pod gpuvirt.io/enforcement",
        "node node01 gpuvirt.io/shares-enforcement",
    ]
    limiting = frozenset({NodeName("node01")})
    fits = explained(300, {"GPU-a": 1000}, {}, requires_limits=True, limiting=limiting).blocker
    assert fits is not None
    assert "node01 has the devices free" in fits.message


def test_a_pod_in_which_no_limit_can_hold_is_blocked_by_its_own_request() -> None:
    reason = Reason(ReasonCode.NO_LIMIT_HOLDS, "pod ml/new", "requires an enforced share", (), "remove it")
    found = explained(300, {"GPU-a": 1000}, {}, requires_limits=True, unconfined=reason)
    assert found.blocker is not None
    assert (found.blocker.code, found.blocker.fix) == (ReasonCode.NO_LIMIT_HOLDS, ("remove it",))
    assert next(stage.step for stage in found.stages if stage.standing is StageOutcome.BLOCKED) is VmStageName.REQUESTS


def test_a_share_that_fits_on_no_single_gpu_names_the_pods_in_the_way() -> None:
    found = explained(
        700,
        {"GPU-a": 1000, "GPU-b": 1000},
        {"a1": {"GPU-a": 600}, "a2": {"GPU-a": 100}, "b1": {"GPU-b": 400}, "b2": {"GPU-b": 200}},
    )
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.NO_FREE_PIECE
    assert "the largest free piece has 400, of 700 units in all" in found.blocker.message
    assert found.blocker.fix[0].startswith("it fits when ml/b1 ends;")
    assert [seen.value for seen in found.blocker.seen[:2]] == [
        "300 of 1000 units free; ml/a1 600, ml/a2 100",
        "400 of 1000 units free; ml/b1 400, ml/b2 200",
    ]


def test_a_pod_with_too_many_arrangements_is_told_to_have_fewer_containers() -> None:
    found = explained(451, {f"GPU-{number}": 1000 for number in range(8)}, {}, containers=17)
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.TOO_COMPLEX
    assert "no arrangement of its 17 containers was found" in found.blocker.message
    assert found.blocker.fix == ("use at most 16 containers with units, or request fewer units",)


IN_TOTAL = "kube-scheduler preempts none: the node has the units in total"


def test_pods_that_kube_scheduler_does_not_preempt_are_named_with_the_commands_that_delete_them() -> None:
    on_gpus = {
        "a1": {"GPU-a": 300},
        "a2": {"GPU-a": 300},
        "a3": {"GPU-a": 300},
        "b1": {"GPU-b": 500},
        "b2": {"GPU-b": 300},
    }
    capacity = {"GPU-a": 1000, "GPU-b": 1000}
    found = explained(300, capacity, on_gpus, priority=5, priorities={"b1": 3, "b2": 9})
    assert found.blocker is not None
    assert found.blocker.fix == (
        "it fits when ml/a3 ends; gpuvirt shares shows all GPUs",
        IN_TOTAL,
        "kubectl delete pod a3 -n ml",
    )
    printed = StringIO()
    print_finding(Console(file=printed, width=80), found.blocker)
    assert max(map(len, printed.getvalue().splitlines())) <= 80


def test_pods_that_kube_scheduler_preempts_or_may_not_preempt_are_named_alone() -> None:
    """By the sum of units, the first does not fit, so that preemption comes; the second has no higher priority."""
    full = {"a": {"GPU-a": 700}, "b": {"GPU-b": 700}}
    for requested, priority in ((700, 5), (500, 0)):
        found = explained(requested, {"GPU-a": 1000, "GPU-b": 1000}, full, priority=priority)
        assert found.blocker is not None
        assert found.blocker.fix == ("it fits when ml/a ends; gpuvirt shares shows all GPUs",)


GPU = {"GPU-a": 1000}
QUARTERS = {f"q{number}": {"GPU-a": 250} for number in range(4)}


def on_nodes(
    nodes: Mapping[str, NodeUsage], *, cordoned: str = "", priority: int = 0, requested: int = 1000
) -> Explanation:
    """Explain a pending pod on several nodes with one GPU each."""
    demand = demand_of([ContainerDemand(ContainerName("main"), ContainerKind.APP, Units(requested))])
    names = {pod: PodShare(f"ml/{pod}", 250) for usage in nodes.values() for pod in usage.all_pods}
    running = [
        PodSeen(pod, "ml", "Running", node, requests={VGPU: sum(usage.used(pod).values())})
        for node, usage in nodes.items()
        for pod in usage.all_pods
    ]
    return explain(
        VmEvidence(
            target=ObjectRef(ObjectKind.POD, "new", "ml"),
            pod=PodSeen("new", "ml", "Pending", requests={VGPU: requested}, conditions=(PENDING,)),
            nodes=tuple(NodeSeen(name, allocatable={VGPU: 1000}, unschedulable=name == cordoned) for name in nodes),
            pods=tuple(running),
            shares=SharesSeen(
                VGPU,
                demand,
                nodes={NodeName(name): usage for name, usage in nodes.items()},
                pods=names,
                priority=priority,
            ),
        )
    )


def test_the_node_where_the_fewest_pods_have_to_end_is_named_first() -> None:
    nodes = {
        "node01": usage_of(GPU, QUARTERS),
        "node02": usage_of(GPU, {"b1": {"GPU-a": 500}, "b2": {"GPU-a": 400}}),
        "node03": usage_of(GPU, {"c1": {"GPU-a": 100}}),
    }
    found = on_nodes(nodes)
    assert found.blocker is not None
    assert found.blocker.subject == "node03"
    assert found.blocker.fix[0].startswith("it fits when ml/c1 ends;")
    assert [verdict.node for verdict in found.nodes] == ["node03", "node02", "node01"]


def test_a_node_where_a_more_important_pod_would_have_to_end_comes_later() -> None:
    nodes = {
        "node01": usage_of(GPU, {"high": {"GPU-a": 1000}}, {"high": 9}),
        "node02": usage_of(GPU, QUARTERS),
    }
    assert [verdict.node for verdict in on_nodes(nodes, priority=5).nodes] == ["node02", "node01"]
    assert [verdict.node for verdict in on_nodes(nodes, priority=9).nodes] == ["node01", "node02"]


def test_a_cordoned_node_comes_after_nodes_where_the_end_of_pods_is_enough() -> None:
    nodes = {"node01": usage_of(GPU, {"a1": {"GPU-a": 100}}), "node02": usage_of(GPU, QUARTERS)}
    assert [verdict.node for verdict in on_nodes(nodes, cordoned="node01").nodes] == ["node02", "node01"]


def test_of_nodes_whose_gpus_are_all_allocated_the_one_with_the_fewest_users_is_named_first() -> None:
    gpu = "nvidia.com/A10"
    counts = {"node01": (1, 1, 1, 1), "node02": (2, 2), "node03": (1, 2, 1)}
    pods = [
        PodSeen(f"p{number}", "ml", "Running", node, requests={gpu: count})
        for node, of_pods in counts.items()
        for number, count in enumerate(of_pods)
    ]
    found = explain(
        VmEvidence(
            target=ObjectRef(ObjectKind.POD, "new", "ml"),
            pod=PodSeen("new", "ml", "Pending", requests={gpu: 4}, conditions=(PENDING,)),
            nodes=tuple(NodeSeen(name, allocatable={gpu: 4}) for name in counts),
            pods=tuple(pods),
        )
    )
    assert [verdict.node for verdict in found.nodes] == ["node02", "node03", "node01"]


def test_a_share_larger_than_the_gpus_of_a_node_says_what_they_have() -> None:
    found = explained(700, {"GPU-a": 500, "GPU-b": 500}, {})
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.NO_GPU_LARGE_ENOUGH
    assert "its largest has 500" in found.blocker.message
    none = explained(100, {"GPU-a": 0}, {"train": {"GPU-a": 500}}, counted=500).blocker
    assert none is not None
    assert none.fix == ("gpuvirt why node/node01",)


@pytest.mark.parametrize("requested", [300, 1000, 2000])
def test_a_share_that_fits_leaves_the_scheduler_as_the_blocker(requested: int) -> None:
    found = explained(requested, {"GPU-a": 1000, "GPU-b": 1000}, {})
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.UNSCHEDULABLE
    assert found.nodes[0].obstacle is None


def test_a_request_of_more_than_a_gpu_and_no_whole_number_is_the_blocker() -> None:
    shares = SharesSeen(VGPU, None, "container main requests 1500 units, and a GPU has 1000")
    found = explain(
        VmEvidence(
            target=ObjectRef(ObjectKind.POD, "new", "ml"),
            pod=PodSeen("new", "ml", "Pending", requests={VGPU: 1500}, conditions=(PENDING,)),
            nodes=(NodeSeen("node01", allocatable={VGPU: 1000}),),
            shares=shares,
        )
    )
    assert found.blocker is not None
    assert found.blocker.code is FindingCode.INVALID_SHARE
    assert [verdict.obstacle.code for verdict in found.nodes if verdict.obstacle is not None] == [found.blocker.code]
    assert next(stage.step for stage in found.stages if stage.standing is StageOutcome.BLOCKED) is VmStageName.REQUESTS


def test_a_value_without_a_place_is_printed_alone() -> None:
    printed = StringIO()
    found = problem(
        FindingCode.NO_FREE_PIECE, "pod ml/p", "was refused", (Seen("", "no room"), Seen("GPU-a", "0 free"))
    )
    print_finding(Console(file=printed, width=80), found)
    assert [line.strip() for line in printed.getvalue().splitlines()[1:]] == ["seen: no room", "seen: GPU-a: 0 free"]
