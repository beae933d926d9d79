"""Pods that the real kube-scheduler places and binds later: for a volume, or for the other pods of a gang."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster

from tests.cluster.extenderlab import GPUVIRT, RESOURCE, SCHEDULER, ExtenderLab, extender_lab, until

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

PORT = 18881
CLASS = "share-later"
SELECTED = "volume.kubernetes.io/selected-node"


@pytest.fixture
def extenders(lab: PlayedCluster, tmp_path: Path) -> Iterator[ExtenderLab]:
    with extender_lab(lab, tmp_path, gates="GenericWorkload=true,GangScheduling=true") as found:
        found.start_for_pods(PORT)
        yield found


def create(extenders: ExtenderLab, name: str, units: int, claim: str = "", group: str = "") -> None:
    """Create a pod with a claim for a volume, or in a group."""
    volume = {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]} if claim else {}
    spec = {
        "schedulerName": SCHEDULER,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"gpuvirt.io/share-test": "true"},
        "containers": [{"name": "main", "image": "none", "resources": {"limits": {RESOURCE: str(units)}}}],
        **volume,
        **({"schedulingGroup": {"podGroupName": group}} if group else {}),
    }
    extenders.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


def is_bound(extenders: ExtenderLab, name: str) -> bool:
    return any(pod.metadata.name == name and pod.spec.node_name for pod in extenders.pods())


def refusal(extenders: ExtenderLab, name: str) -> str:
    path = '{.status.conditions[?(@.type=="PodScheduled")].message}'
    return extenders.kubectl("get", "pod", name, "-o", f"jsonpath={path}")


@pytest.fixture
def claim(extenders: ExtenderLab) -> Iterator[str]:
    """A claim whose volume is made for the node of its first pod; the test makes it, or nobody does."""
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": CLASS}}
    amount = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": CLASS, "resources": amount}
    extenders.apply(
        {**kind, "provisioner": "example.com/played", "volumeBindingMode": "WaitForFirstConsumer"},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": spec},
    )
    yield "data"
    extenders.cluster.kubectl("delete", "pod", "waits", "--force", "--namespace", "default")
    extenders.cluster.kubectl("delete", "pvc", "data", "--wait=false", "--namespace", "default")
    extenders.cluster.kubectl("delete", "pv", "share-data", "--wait=false")
    extenders.cluster.kubectl("delete", "storageclass", CLASS)


def selected_node(extenders: ExtenderLab) -> str:
    """Return the node for which kube-scheduler wants the volume: from then on the pod waits in PreBind."""
    content = json.loads(extenders.kubectl("get", "pvc", "data", "-o", "json"))
    return str(content["metadata"].get("annotations", {}).get(SELECTED, ""))


def provision(extenders: ExtenderLab) -> None:
    """Make the volume, as the provisioner of its class does."""
    claim = json.loads(extenders.kubectl("get", "pvc", "data", "-o", "json"))["metadata"]
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": CLASS,
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": "default", "name": "data", "uid": claim["uid"]},
        "csi": {"driver": "example.com", "volumeHandle": "data"},
    }
    extenders.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "share-data"}, "spec": spec})


def fill(extenders: ExtenderLab, claim: str) -> None:
    """Have a pod wait for its volume, and another bound beside it, and create one that needs the place of the first.

    700 + 700 + 600 units are the sum of the node, but not of its two GPUs.
    """
    extenders.make_nodes(1)
    create(extenders, "waits", 700, claim)
    until(lambda: selected_node(extenders) == "share00", extenders.logs)
    create(extenders, "beside", 700)
    until(lambda: is_bound(extenders, "beside"), extenders.logs)
    create(extenders, "late", 600)


def test_a_pod_keeps_its_place_until_its_volume_is_there(extenders: ExtenderLab, claim: str) -> None:
    fill(extenders, claim)
    held = "more is kept for pods that wait to be bound there: default/waits"
    until(lambda: held in refusal(extenders, "late"), lambda: refusal(extenders, "late"))
    asks = ("why", "pod/late", "-n", "default", "--kubeconfig", str(extenders.cluster.kubeconfig))
    answer = subprocess.run(
        ["/usr/bin/env", "COLUMNS=500", *GPUVIRT, *asks], capture_output=True, text=True, check=False
    )
    assert held in answer.stdout
    provision(extenders)
    until(lambda: is_bound(extenders, "waits"), extenders.logs)
    assert not is_bound(extenders, "late")
    extenders.assert_not_overcommitted()


def test_a_pod_that_is_deleted_while_it_waits_leaves_its_place(extenders: ExtenderLab, claim: str) -> None:
    fill(extenders, claim)
    until(lambda: "default/waits" in refusal(extenders, "late"), lambda: refusal(extenders, "late"))
    extenders.kubectl("delete", "pod", "waits", "--force")
    until(lambda: is_bound(extenders, "late"), extenders.logs)
    extenders.assert_not_overcommitted()


def make_group(extenders: ExtenderLab, name: str, pods: int, units: int) -> None:
    """Create pods of which kube-scheduler binds all or none."""
    served = extenders.kubectl("api-versions").split()
    version = next(known for known in served if known.startswith("scheduling.k8s.io/v1") and "a" in known[18:])
    policy = {"schedulingPolicy": {"gang": {"minCount": pods}}}
    extenders.apply({"apiVersion": version, "kind": "PodGroup", "metadata": {"name": name}, "spec": policy})
    for number in range(pods):
        create(extenders, f"{name}-{number}", units, group=name)


def test_a_gang_is_bound_whole_or_not_at_all(extenders: ExtenderLab) -> None:
    """Each of two nodes has room for two pods of 600 units, though by the sum for three."""
    extenders.make_nodes(2)
    make_group(extenders, "fits", 3, 600)
    until(lambda: extenders.bound("fits") == 3, extenders.logs)
    make_group(extenders, "large", 2, 600)
    until(lambda: refusal(extenders, "large-0") != "", extenders.logs)
    create(extenders, "small", 600)
    until(lambda: is_bound(extenders, "small"), extenders.logs)
    assert extenders.bound("large") == 0
    extenders.assert_not_overcommitted()
    extenders.kubectl("delete", "pods", "fits-0", "fits-1", "fits-2", "--force")
    until(lambda: extenders.bound("large") == 2, extenders.logs)
    extenders.assert_not_overcommitted()
    extenders.kubectl("delete", "podgroups", "--all", "--wait=false")
