"""The real kube-scheduler preempts pods with shares: which pods go, which are spared, and where no eviction comes."""

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.model.shares.annotations import SHARES_ANNOTATION
from tests.cluster.extenderlab import GPUVIRT, RESOURCE, SCHEDULER, ExtenderLab, extender_lab, until

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

PORT = 18881
PRIORITIES = {"share-low": 5, "share-high": 1000, "share-top": 5000}


@pytest.fixture
def extenders(lab: PlayedCluster, tmp_path: Path) -> Iterator[ExtenderLab]:
    with extender_lab(lab, tmp_path) as found:
        found.apply(
            *(
                {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": of}
                for name, of in PRIORITIES.items()
            )
        )
        found.start_for_pods(PORT)
        yield found


def create(extenders: ExtenderLab, name: str, units: int, priority: str = "", app: str = "") -> None:
    """Create a pod."""
    spec = {
        "schedulerName": SCHEDULER,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"gpuvirt.io/share-test": "true"},
        "containers": [{"name": "main", "image": "none", "resources": {"limits": {RESOURCE: str(units)}}}],
        **({"priorityClassName": priority} if priority else {}),
    }
    metadata = {"name": name, "labels": {"app": app or name}}
    extenders.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


def create_bound(extenders: ExtenderLab, name: str, units: int, priority: str = "", app: str = "") -> None:
    """Create a pod, and wait until it is bound: so the next one goes to the GPU with the least room."""
    create(extenders, name, units, priority, app)
    until(lambda: name in gpus(extenders), extenders.logs)


def gpus(extenders: ExtenderLab) -> Mapping[str, str]:
    """Return the annotation with the GPUs of each pod that is bound."""
    return {
        pod.metadata.name: pod.metadata.annotations.get(SHARES_ANNOTATION, "")
        for pod in extenders.pods()
        if pod.spec.node_name
    }


def refusal(extenders: ExtenderLab, name: str) -> str:
    """Return the message of a pod's condition, by which kube-scheduler says why it is not bound."""
    path = '{.status.conditions[?(@.type=="PodScheduled")].message}'
    return extenders.kubectl("get", "pod", name, "-o", f"jsonpath={path}")


def why(extenders: ExtenderLab, name: str) -> str:
    """Return what `gpuvirt why` prints on a terminal of 80 columns."""
    asks = ("why", f"pod/{name}", "-n", "default", "--kubeconfig", str(extenders.cluster.kubeconfig))
    return subprocess.run(
        ["/usr/bin/env", "COLUMNS=80", *GPUVIRT, *asks], capture_output=True, text=True, check=False
    ).stdout


def protect(extenders: ExtenderLab, *apps: str) -> None:
    """Create a PodDisruptionBudget for each app; its pods are never ready, so that it allows no eviction."""
    for app in apps:
        spec = {
            "minAvailable": 1,
            "selector": {"matchExpressions": [{"key": "app", "operator": "In", "values": [app]}]},
        }
        metadata = {"name": f"share-{app}", "namespace": "default"}
        extenders.apply({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec})


def test_units_that_are_free_in_total_alone_lead_to_no_eviction(extenders: ExtenderLab) -> None:
    """kube-scheduler looks for victims only where a pod does not fit by the sum, so the extender is not asked.

    Once a user has deleted the pod that `gpuvirt why` names, the pod is bound.
    """
    extenders.make_nodes(1)
    create_bound(extenders, "one", 600)
    create_bound(extenders, "two", 600)
    create(extenders, "high", 700, priority="share-high")
    until(lambda: "expected at least one victim pod" in refusal(extenders, "high"), lambda: refusal(extenders, "high"))
    assert gpus(extenders).keys() == {"one", "two"}
    assert "the largest free piece of a GPU is 400" in refusal(extenders, "high")
    assert extenders.replicas[0].metric('gpuvirt_extender_requests_total{verb="preempt",result="ok"}') == 0
    text = "kube-scheduler preempts none: the node has the units in total"
    until(lambda: text in why(extenders, "high"), lambda: why(extenders, "high"))  # a slow computer's node is not ready
    answer = why(extenders, "high")
    assert max(map(len, answer.splitlines())) <= 80, answer
    (command,) = (line.split() for line in answer.splitlines() if "kubectl delete" in line)
    assert command[-3] in {"one", "two"}
    extenders.kubectl(*command[-5:])
    until(lambda: "high" in gpus(extenders), extenders.logs)


def test_victims_on_two_gpus_become_those_of_one_and_protected_pods_stay(extenders: ExtenderLab) -> None:
    """GPU 0 has a and b, GPU 1 has c and d.

    kube-scheduler spares d, which a budget covers, and a, which has the highest priority; b and c free no GPU.
    """
    extenders.make_nodes(1)
    create_bound(extenders, "a", 500, priority="share-low")
    for name in "bcd":
        create_bound(extenders, name, 500)
    protect(extenders, "d")
    freed = gpus(extenders)["a"].split('"')[5]
    assert freed in gpus(extenders)["b"]
    create(extenders, "high", 1000, priority="share-high")
    until(lambda: "high" in gpus(extenders), extenders.logs)
    assert gpus(extenders).keys() == {"c", "d", "high"}
    assert freed in gpus(extenders)["high"]
    extenders.assert_not_overcommitted()


def test_a_pod_gets_the_gpu_that_was_freed_for_it(extenders: ExtenderLab) -> None:
    """Two GPUs have 300 units left. By the sum, a small pod fits beside the large one, and would take its GPU.

    A hundred small pods are created meanwhile, so that kube-scheduler has some to place when the GPU becomes free.
    """
    extenders.make_nodes(1, gpus=3)
    for name in ("pinned-a", "pinned-b"):
        create_bound(extenders, name, 700, priority="share-top")
    create_bound(extenders, "victim", 1000)
    extenders.deploy("small", 100, 500)
    create(extenders, "high", 1000, priority="share-high")
    until(lambda: "victim" not in gpus(extenders), extenders.logs)
    until(lambda: any(name == "high" or name.startswith("small") for name in gpus(extenders)), extenders.logs)
    assert gpus(extenders).keys() == {"pinned-a", "pinned-b", "high"}
    extenders.kubectl("delete", "pod", "high")
    until(lambda: len(gpus(extenders)) == 4, extenders.logs)
    extenders.assert_not_overcommitted()
