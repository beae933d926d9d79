"""The rights of the extender on a real API server: it fences pods that are not bound, and changes nothing else."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab.cluster import settings

from gpuvirt.clock import RealClock
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.resources import pods
from gpuvirt.model.shares.annotations import FENCE_ANNOTATION
from gpuvirt.shares.objects import SharingPod
from tests.cluster.labnamespace import BOX, LabNamespace
from tests.deploy.chart.helmchart import NAMESPACE, Helm

pytestmark = [
    pytest.mark.ring("cluster"),
    pytest.mark.ring("helm"),
    pytest.mark.xdist_group("controlplane"),
]

KINDS = "ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"
ONLY = "gpuvirt's extender may "


@dataclass(frozen=True, slots=True)
class Account:
    """The extender's service account, by impersonation."""

    client: Client
    namespace: str

    async def refusal(self, pod: str, patch: Mapping[str, object], part: str = "status") -> str:
        """Return why the account may not patch a pod; empty if it may."""
        try:
            await self.client.patch(pods(self.namespace), pod, patch, PatchType.MERGE, SharingPod, part=part)
        except ApiError as error:
            return str(error)
        return ""


def account(node: LabNamespace, folder: Path) -> Account:
    path, cluster = folder / "extender.kubeconfig", node.cluster
    user = f"{{token: {settings.ADMIN_TOKEN}, as: 'system:serviceaccount:{NAMESPACE}:gpuvirt-extender'}}"
    path.write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: '{cluster.server}', certificate-authority: {cluster.ca}}}}}]
users: [{{name: u, user: {user}}}]
""")
    return Account(Client(from_kubeconfig(path)), node.namespace)


def changed(key: str, value: str, part: str = "annotations") -> Mapping[str, object]:
    return {"metadata": {part: {key: value}}}


@pytest.fixture
def applied(helm: Helm, node: LabNamespace) -> Iterator[None]:
    """Apply the extender's roles and policy, and delete them afterwards: a release owns objects of these names."""
    rendered = helm.template("extender.enabled=true")
    try:
        for kind in KINDS:
            node.apply(rendered.one(kind, "gpuvirt-extender"))
        yield
    finally:
        for kind in KINDS:
            node.cluster.kubectl("delete", kind, "gpuvirt-extender", "--ignore-not-found")


@pytest.mark.usefixtures("applied")
async def test_the_extender_may_change_only_its_annotation_of_pods_that_are_not_bound(
    node: LabNamespace, tmp_path: Path
) -> None:
    extender = account(node, tmp_path)
    containers = [{"name": "main", "image": BOX, "imagePullPolicy": "Never"}]
    for name, field, value in (("waits", "schedulerName", "none"), ("bound", "nodeName", settings.NODE)):
        metadata = {"name": name, "namespace": node.namespace, "labels": {"app": "x"}}
        spec = {field: value, "containers": containers}
        node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    numbers = itertools.count()
    # The API server takes a moment to apply roles and policies.
    while ONLY not in await extender.refusal("waits", changed("app", str(next(numbers)), "labels")):
        await RealClock().sleep(0.1)
    assert await extender.refusal("waits", changed(FENCE_ANNOTATION, "1")) == ""
    assert await extender.refusal("waits", changed(FENCE_ANNOTATION, "2")) == ""
    shown = json.loads(node.kubectl("get", "pod", "waits", "-o", "json"))
    assert shown["metadata"]["annotations"][FENCE_ANNOTATION] == "2"
    for pod, patch, why in (
        ("waits", changed("gpuvirt.io/shares", "{}"), "set only the annotation"),
        ("waits", {"status": {"message": "x"}}, "not change the spec or the status"),
        ("bound", changed(FENCE_ANNOTATION, "1"), "change only pods that are not bound"),
    ):
        assert f"{ONLY}{why}" in await extender.refusal(pod, patch)
    assert "answers 403" in await extender.refusal("waits", changed(FENCE_ANNOTATION, "3"), part="")
