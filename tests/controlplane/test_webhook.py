"""The admission webhook on a real API server: what it adds passes quotas, limits and pod security; and its outage."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import pytest
from lab.cluster import settings

from gpuvirt.webhook.injectionconfig import parse
from tests.cluster.labnamespace import LabNamespace
from tests.cluster.webhooklab import NAME, Answer, WebhookLab, pod, until, webhook_lab
from tests.deploy.chart.helmchart import Helm, at, items
from tests.webhook.goldens import decided

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.xdist_group("controlplane"),
]

KATA = settings.EXEMPT
VGPU = "tencent.com/vgpu-492"
OTHERS = 1000


@pytest.fixture
def webhook(node: LabNamespace, helm: Helm, tmp_path: Path) -> Iterator[WebhookLab]:
    with webhook_lab(node, helm, tmp_path) as lab:
        yield lab


def names(content: object) -> list[object]:
    assert isinstance(content, list)
    return [item["name"] for item in content]


def enforce_baseline(webhook: WebhookLab) -> None:
    """Have pod security hold in the namespace; the API server admits pods by its own, later copy of the label."""
    node = webhook.node
    node.kubectl("label", "namespace", node.namespace, "pod-security.kubernetes.io/enforce=baseline")
    spec = {"containers": [{"name": "main", "image": "x:1"}], "hostNetwork": True}

    def answer() -> Answer:
        return webhook.pods.create({"metadata": {"name": "privileged"}, "spec": spec}, dry_run=True)

    until(lambda: "violates PodSecurity" in answer().message, answer)


def test_the_documents_pod_passes_quota_limits_and_pod_security(webhook: WebhookLab) -> None:
    node = webhook.node
    enforce_baseline(webhook)
    hard = {"requests.cpu": "2", "requests.memory": "2Gi", "limits.cpu": "2", "limits.memory": "2Gi"}
    quota = {"hard": hard | {f"requests.{VGPU}": "1"}}
    limits = [
        {
            "type": "Container",
            "default": {"cpu": "500m", "memory": "256Mi"},
            "max": {"cpu": "1", "memory": "1Gi"},
            "min": {"cpu": "10m", "memory": "16Mi"},
        }
    ]
    for kind, rules in (("ResourceQuota", quota), ("LimitRange", {"limits": limits})):
        metadata = {"name": "all", "namespace": node.namespace}
        node.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": rules})
    created = webhook.pods.create(pod("train", KATA))
    assert created.status == 201, created.message
    spec = at(created.body, "spec")
    first, second = items(at(spec, "initContainers"))
    assert (at(first, "name"), at(first, "resources", "limits", VGPU)) == ("nvidia", "1")
    assert (at(second, "name"), at(second, "restartPolicy")) == ("gridd", "Always")
    (main,) = items(at(spec, "containers"))
    assert {"dev", "nvidia-driver"} <= set(map(str, names(at(main, "volumeMounts"))))
    assert "can't plug mediated devices" in " ".join(created.warnings)
    used = json.loads(node.kubectl("get", "resourcequota", "all", "-o", "json"))["status"]["used"]
    assert used[f"requests.{VGPU}"] == "1", "nvidia and main have the same vGPU"
    refused = webhook.pods.create(pod("second", KATA))
    assert (refused.status, "exceeded quota" in refused.message) == (403, True)


def test_a_pod_whose_containers_have_all_of_its_resources_is_admitted(webhook: WebhookLab) -> None:
    amounts = {"cpu": "1", "memory": "1Gi"}
    containers = [{"name": "main", "image": "x:1", "resources": {"limits": {**amounts, VGPU: "1"}}}]
    spec = {"runtimeClassName": KATA, "resources": {"limits": amounts, "requests": amounts}, "containers": containers}
    admitted = webhook.pods.create({"metadata": {"name": "p"}, "spec": spec}, dry_run=True)
    assert admitted.status == 201, admitted.message
    first, _ = items(at(admitted.body, "spec", "initContainers"))
    assert at(first, "resources", "limits") == {VGPU: "1"}


def test_a_pod_that_the_api_server_has_completed_is_not_changed_again(webhook: WebhookLab) -> None:
    stored = webhook.pods.create(pod("stored", KATA)).body
    config = parse(f"version: v1\nclasses: {{{KATA}: {{profile: hot-plug}}}}", where="c")
    found = decided(stored, config)
    assert (found.refusal, found.operations) == (None, ())


def test_a_class_that_is_not_exempt_is_refused_by_pod_security(webhook: WebhookLab) -> None:
    enforce_baseline(webhook)
    refused = webhook.pods.create(pod("a", "kata-strict", "nvidia.com/NVIDIA_L40S-12Q"))
    assert refused.status == 403
    assert 'violates PodSecurity "baseline:latest"' in refused.message
    assert "hostPath volumes" in refused.message


def test_users_see_why_a_pod_is_refused(webhook: WebhookLab) -> None:
    for resource, runtime_class, code in (
        ("nvidia.com/vgpu", KATA, "UnitsInKata: the pod requests nvidia.com/vgpu"),
        (VGPU, "kata-strict", "MdevInKata: the pod requests tencent.com/vgpu-492"),
    ):
        refused = webhook.pods.create(pod("a", runtime_class, resource))
        assert refused.status == 403
        assert f'admission webhook "kata.gpuvirt.io" denied the request: {code}' in refused.message


def test_an_exempt_class_gives_users_no_rights_on_the_node(webhook: WebhookLab) -> None:
    node = webhook.node
    enforce_baseline(webhook)

    def answer(spec: Mapping[str, object], **container: object) -> Answer:
        given = {"name": "main", "image": "x:1", "resources": {"limits": {VGPU: "1"}}, **container}
        pod = {"metadata": {"name": "p"}, "spec": {"runtimeClassName": KATA, "containers": [given], **spec}}
        return webhook.pods.create(pod, dry_run=True)

    root = {"volumes": [{"name": "root", "hostPath": {"path": "/"}}]}
    until(lambda: "may have no hostPath but /dev" in answer(root).message, lambda: answer(root).message)
    admitted = answer({}, securityContext={"capabilities": {"add": ["CHOWN"]}})
    assert admitted.status == 201, admitted.message
    policy = json.loads(node.kubectl("get", "validatingadmissionpolicy", NAME, "-o", "json"))
    assert "expressionWarnings" not in policy.get("status", {}).get("typeChecking", {})
    tree = {"name": "nvidia-driver", "mountPath": "/tree"}
    for spec, container, why in (
        ({}, {"volumeMounts": [tree]}, "must be mounted with readOnly"),
        ({}, {"volumeMounts": [{"name": "dev", "mountPath": "/disk", "subPath": "sda"}]}, "mounted as a whole"),
        ({"hostNetwork": True}, {}, "may not share the node's namespaces"),
        ({"hostPID": True}, {}, "may not share the node's namespaces"),
        ({}, {"securityContext": {"privileged": True}}, "may have no privileged container"),
        ({}, {"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}, "may have additional capabilities"),
        ({}, {"ports": [{"containerPort": 80, "hostPort": 80}]}, "may have no hostPort"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/opt"}}]}, {}, "may have no hostPath but /dev"),
    ):
        refused = answer(spec, **container)
        assert (refused.status, why in refused.message) == (422, True), refused.message


def test_pods_with_units_of_a_labelled_namespace_are_scheduled_by_gpuvirts_scheduler(webhook: WebhookLab) -> None:
    node, units = webhook.node, "nvidia.com/vgpu"

    def scheduler(resource: str = units, **spec: object) -> object:
        containers = [{"name": "main", "image": "x:1", "resources": {"limits": {resource: "1"}}}]
        given = {"metadata": {"name": "p"}, "spec": {**spec, "containers": containers}}
        return at(webhook.pods.create(given, dry_run=True).body, "spec", "schedulerName")

    assert scheduler() == "default-scheduler"
    node.kubectl("label", "namespace", node.namespace, "gpuvirt.io/scheduler=gpuvirt-scheduler")
    first = {"name": "i", "image": "x:1", "resources": {"limits": {units: "1"}}}
    until(lambda: scheduler() != "default-scheduler", webhook.log.read_text)  # the label is cached
    assert scheduler() == "gpuvirt-scheduler"
    assert scheduler("cpu", initContainers=[first]) == "gpuvirt-scheduler"
    assert scheduler("cpu") == "default-scheduler"
    assert scheduler(schedulerName="mine") == "mine"
    refused = webhook.pods.create(pod("kata", KATA, units))
    assert "UnitsInKata" in refused.message
    webhook.stop()
    assert "shares.gpuvirt.io" in webhook.pods.create(pod("stopped", None, units)).message
    assert scheduler("cpu") == "default-scheduler"


def other(random: Random, number: int) -> Mapping[str, object]:
    """Return a pod of random shape without a RuntimeClass of Kata."""

    def container(name: str) -> Mapping[str, object]:
        amounts = random.choice([{}, None, {VGPU: "1"}, {"nvidia.com/vgpu": "300"}, {"cpu": "1", "memory": "1Gi"}])
        return {
            "name": name,
            "image": "x:1",
            "resources": random.choice([{"limits": amounts}, {}, None]),
            "env": random.choice([None, [], [{"name": "PATH", "value": "/bin"}]]),
            "volumeMounts": random.choice([None, [{"name": "v", "mountPath": "/dev"}]]),
        }

    spec: dict[str, object] = {
        "containers": [container(f"c{index}") for index in range(random.randint(1, 3))],
        "initContainers": random.choice([None, [], [container("nvidia")], [container("i")]]),
        "volumes": [random.choice([{"name": "v", "emptyDir": {}}, {"name": "v", "hostPath": {"path": "/dev"}}])],
        "hostNetwork": random.choice([True, False, None]),
    }
    if random.random() < 0.7:
        spec["runtimeClassName"] = random.choice([None, "runc-like"])
    labels = random.choice([None, {}, {"app": "x"}])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}", "labels": labels}, "spec": spec}


def test_an_outage_blocks_pods_of_kata_and_no_others(webhook: WebhookLab) -> None:
    webhook.stop()
    for runtime_class in (KATA, "kata-strict"):
        refused = webhook.pods.create(pod("kata", runtime_class), dry_run=True)
        assert refused.status == 500
        assert 'failed calling webhook "kata.gpuvirt.io"' in refused.message
    random = Random(20)  # noqa: S311  it keeps no secrets
    answers = [webhook.pods.create(other(random, number), dry_run=True) for number in range(OTHERS)]
    assert [answer.message for answer in answers if answer.status != 201] == []
