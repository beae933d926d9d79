"""Shared GPUs by the guide, on a real node: the chart's extender, second scheduler and agent, and containers with CDI.

What each container prints equals the pod's annotation, the agent's records and metrics, and `gpuvirt shares`.
"""

import json
from collections import Counter
from collections.abc import Iterator

import pytest
import yaml
from lab.cluster.settings import NODE

from tests.cluster.chartlab import NAMESPACE, Install
from tests.cluster.clusterlab import LabNode
from tests.cluster.rights import Right, asked_in, outside, rights_in, unused
from tests.cluster.sharenodes import share_nodes
from tests.cluster.sharinglab import EXTENDER_PORT, SharingLab, sharing_lab
from tests.cluster.sharingpods import SHOW, SLEEP, VGPU, Part

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("helm"), pytest.mark.xdist_group("cluster")]

EXTENDER, AGENT = "gpuvirt-extender", "gpuvirt-node"
SHARES_RIGHTS = {"pods", "pods/status"}
"""The agent's, in addition to those of agents that share no GPUs."""
NOT_HERE = "endpointslices/restricted"
"""OpenShift alone asks for it."""


@pytest.fixture
def sharing(user: Install, node: LabNode) -> Iterator[SharingLab]:
    """The lab's node with two GPUs that can be shared, before the install."""
    with sharing_lab(user, node) as found:
        yield found


def test_pods_get_their_shares_from_the_chart_to_the_container(sharing: SharingLab) -> None:
    log = sharing.user.cluster.audit_log
    begin = log.stat().st_size if log.exists() else 0
    release = sharing.install()
    two_equal_pods_at_once_have_the_same_gpu(sharing)
    containers_of_one_pod_have_their_own_shares(sharing)
    a_pod_that_no_extender_places_gets_a_gpu_of_the_agent(sharing)
    a_pod_waits_for_a_piece_and_then_runs(sharing)
    a_container_gets_two_whole_gpus(sharing)
    restarts_keep_the_usage(sharing)
    deleted_pods_leave_nothing(sharing)
    a_deployment_fills_this_node_and_twenty_others(sharing)
    an_unknown_pod_is_not_bound(sharing)
    granted = rights_in(yaml.safe_load_all(sharing.user.must("get", "manifest", release, "-n", NAMESPACE)))
    with log.open() as file:
        file.seek(begin)
        accounts_use_their_rights(granted, list(file))
    accounts_may_do_nothing_else(sharing)


def two_equal_pods_at_once_have_the_same_gpu(sharing: SharingLab) -> None:
    sharing.start(one=[Part(300)], other=[Part(300)])
    sharing.assert_has_what_it_prints("one")
    sharing.assert_has_what_it_prints("other")
    assert sharing.printed("one").gpus == sharing.printed("other").gpus, "the fullest GPU that suffices"
    sharing.begin_with("one")
    sharing.until_used(600, 0)
    pods = [f"pod {sharing.node.namespace}/{name}" for name in ("one", "other")]
    sharing.node.until(lambda: sharing.users() == (1, pods), lambda: str(sharing.users()))


def containers_of_one_pod_have_their_own_shares(sharing: SharingLab) -> None:
    side = Part(100, "side", init=True, sidecar=True)
    first = Part(500, "first", SHOW, init=True)
    sharing.start(parts=[side, first, Part(300), Part(200, "more")])
    sharing.assert_has_what_it_prints("parts", "side", "first", "main", "more")
    sharing.until_used(600, 600)  # 100 beside 500, at first and later
    sharing.node.delete("parts")
    sharing.until_used(600, 0)


def a_pod_that_no_extender_places_gets_a_gpu_of_the_agent(sharing: SharingLab) -> None:
    sharing.start("default-scheduler", elsewhere=[Part(500)])
    sharing.until_used(600, 500)
    sharing.assert_has_what_it_prints("elsewhere")
    sharing.node.delete("elsewhere")


def a_pod_waits_for_a_piece_and_then_runs(sharing: SharingLab) -> None:
    sharing.start(half=[Part(600)])
    sharing.until_used(600, 600)
    sharing.start(wide=[Part(700)])
    expected = f"1 {VGPU}: 700 units requested, the largest free piece of a GPU is 400"
    sharing.node.until(lambda: expected in sharing.unscheduled("wide"), lambda: sharing.unscheduled("wide"))
    found = sharing.shares()
    assert (found.free, [node.largest for node in found.nodes]) == (800, [400])
    blocker = sharing.why("wide")
    assert blocker is not None
    assert (blocker.code, blocker.subject) == ("NoFreePiece", NODE)
    assert blocker.message.startswith("has no GPU with 700 units left; the largest free piece has 400, of 800 units")
    (fix,) = blocker.fix
    ends = fix.removeprefix(f"it fits when {sharing.node.namespace}/").removesuffix(
        " ends; gpuvirt shares shows all GPUs"
    )
    assert ends in {"one", "other", "half"}, fix
    sharing.node.delete("half")
    sharing.assert_has_what_it_prints("wide")
    sharing.until_used(600, 700)
    assert sharing.why("wide") is None
    for name in ("one", "other", "wide"):
        sharing.node.delete(name)
    sharing.until_used(0, 0)


def a_container_gets_two_whole_gpus(sharing: SharingLab) -> None:
    sharing.start(whole=[Part(2000)])
    sharing.assert_has_what_it_prints("whole")
    sharing.until_used(1000, 1000)
    sharing.node.delete("whole")
    sharing.until_used(0, 0)


def restarts_keep_the_usage(sharing: SharingLab) -> None:
    """The agent and the extenders are replaced, the kubelet and a container are restarted.

    A pod that fits nowhere waits meanwhile, which the next extender changes before it serves.
    """
    node = sharing.node
    sharing.start(keeps=[Part(400)], again=[Part(300)], waits=[Part(3000)])
    for name in ("keeps", "again"):
        sharing.assert_has_what_it_prints(name)
    sharing.begin_with("keeps")
    sharing.until_used(700, 0)
    before, seen = sharing.records, sharing.printed("again")
    agent, extenders = (
        ("pods", "-n", NAMESPACE, "-l", f"app.kubernetes.io/component={component}")
        for component in ("node", "extender")
    )
    for pods in (agent, extenders):
        sharing.user.kubectl("delete", *pods)
    sharing.user.kubectl("wait", *agent, "--for=condition=Ready", "--timeout=60s")
    assert sharing.after_a_restart("again") == seen
    node.cluster.stop("kubelet")
    node.cluster.start_kubelet()
    node.until_allocatable(VGPU, 2000)
    assert sharing.after_a_restart("again") == seen
    assert sharing.records == before
    sharing.until_used(700, 0)
    fence = ("get", "pod", "waits", "-o", r"jsonpath={.metadata.annotations.gpuvirt\.io/shares-fence}")
    node.until(lambda: bool(node.kubectl(*fence)), lambda: node.kubectl(*fence))
    node.delete("waits")
    assert node.status("keeps").containerStatuses[0].restartCount == 0
    sharing.start(new=[Part(400)])
    sharing.assert_has_what_it_prints("new")
    sharing.until_used(700, 400)


def a_deployment_fills_this_node_and_twenty_others(sharing: SharingLab) -> None:
    """Each node has room for four pods of 500 units; those on the real node run, and see their GPUs."""
    with share_nodes(sharing.user.cluster) as nodes:
        nodes.make_nodes(20)
        nodes.adopt(NODE, dict.fromkeys(sharing.gpus, 1000))
        nodes.deploy("app", 90, 500, script=SLEEP)
        sharing.node.until(lambda: nodes.bound() == 84, lambda: f"{nodes.bound()} pods are bound")
        nodes.assert_not_overcommitted()
        here = [pod.metadata.name for pod in nodes.pods() if pod.spec.node_name == NODE]
        seen = Counter(sharing.printed(name, namespace="default").gpus for name in here)
        assert seen == {frozenset([gpu]): 2 for gpu in sharing.gpus}
        found = sharing.shares()
        assert (len(found.nodes), found.free) == (21, 0)
        nodes.kubectl("scale", "deployment", "app", "--replicas=0")
        sharing.until_used(0, 0)


def deleted_pods_leave_nothing(sharing: SharingLab) -> None:
    sharing.node.kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
    sharing.until_used(0, 0)
    sharing.node.until(lambda: not sharing.specs, lambda: str(sharing.specs))
    assert sharing.records.pods == {}
    extender = sharing.metrics("extender", 8889)
    assert extender['gpuvirt_extender_units{state="free"}'] == 2000
    assert extender['gpuvirt_extender_pods{gpus="known"}'] == extender['gpuvirt_extender_pods{gpus="unknown"}'] == 0


def an_unknown_pod_is_not_bound(sharing: SharingLab) -> None:
    """The extender reads a pod that its watches have not reported."""
    pod = {"PodName": "nobody", "PodNamespace": sharing.node.namespace, "PodUID": "0-0"}
    refused = json.loads(sharing.answer("extender", EXTENDER_PORT, "/bind", {**pod, "Node": NODE}))
    assert refused["Error"].endswith("/nobody is gone"), refused


def accounts_use_their_rights(granted: frozenset[Right], log: list[str]) -> None:
    """Each right of the extender, and those that agents have for shares, were used, and the extender needs no other."""
    asked = [request for request in asked_in(log) if request.account in {EXTENDER, AGENT}]
    assert outside(granted, (request for request in asked if request.account == EXTENDER)) == []
    own = (
        right
        for right in granted
        if right.account == EXTENDER or (right.account == AGENT and right.resource in SHARES_RIGHTS)
    )
    assert [right for right in unused(own, asked) if right.resource != NOT_HERE] == []


def accounts_may_do_nothing_else(sharing: SharingLab) -> None:
    """The API server refuses what would harm tenants."""
    sharing.start(tenant=[Part(300)])
    sharing.printed("tenant")
    labelled = ("-p", '{"metadata": {"labels": {"a": "b"}}}')
    tries = (
        (EXTENDER, "patch", "pod", "tenant", *labelled),
        (EXTENDER, "patch", "pod", "tenant", "--subresource=status", *labelled),
        (EXTENDER, "delete", "pod", "tenant"),
        (EXTENDER, "get", "secrets"),
        (EXTENDER, "patch", "node", NODE, *labelled),
        (AGENT, "patch", "pod", "tenant", *labelled),
        (AGENT, "patch", "pod", "tenant", "--subresource=status", *labelled),
        (AGENT, "get", "secrets"),
    )
    for account, *command in tries:
        given = (f"--as=system:serviceaccount:{NAMESPACE}:{account}", "-n", sharing.node.namespace)
        done = sharing.user.cluster.kubectl(*command, *given)
        assert done.returncode != 0, (account, command)
        assert "orbidden" in done.stderr or "gpuvirt's agent may" in done.stderr, done.stderr
