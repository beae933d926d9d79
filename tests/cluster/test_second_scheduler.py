"""The chart's second kube-scheduler on a real node, with the rights that the chart gives."""

import pytest
from lab.cluster.schedulerimage import import_kube_scheduler

from tests.cluster.chartlab import NAMESPACE, Install
from tests.cluster.clusterlab import LabNode
from tests.cluster.labnamespace import BOX

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

SHARES = "nvidia.com/vgpu"


RIGHTS = (
    ("extender", "create", "pods/binding", "yes"),
    ("extender", "watch", "pods", "yes"),
    ("extender", "patch", "pods", "no"),
    ("extender", "patch", "pods/status", "yes"),
    ("extender", "update", "leases.coordination.k8s.io", "no"),
    ("extender", "create", "endpointslices.discovery.k8s.io", "no"),
    ("extender", "get", "services", "no"),
    ("extender", "get", "secrets", "no"),
    ("node", "patch", "pods/status", "yes"),
    ("node", "patch", "pods", "no"),
    ("node", "create", "pods/binding", "no"),
    ("scheduler", "create", "pods/binding", "yes"),
    ("scheduler", "get", "configmaps", "no"),
)
"""Accounts of the chart, and whether they may do something in a tenant's namespace."""


@pytest.mark.ring("helm")
def test_the_charts_second_scheduler_schedules_pods(user: Install, node: LabNode) -> None:
    image = {"repository": import_kube_scheduler(user.cluster, "v1"), "tag": "v1", "pullPolicy": "Never"}
    values = [f"scheduler.image.{key}={value}" for key, value in image.items()]
    # The extender is not needed for a pod without units.
    release = user.installed("extender.enabled=true", "extender.replicas=0", "scheduler.enabled=true", *values)
    lease = ("get", "lease", "gpuvirt-scheduler", "-n", NAMESPACE, "-o", "jsonpath={.spec.holderIdentity}")
    node.until(lambda: "gpuvirt-scheduler" in user.cluster.kubectl(*lease).stdout, user.pods)
    spec = {"schedulerName": "gpuvirt-scheduler", "containers": [{"name": "main", "image": BOX, "args": ["sleep 1"]}]}
    metadata = {"name": "plain", "namespace": node.namespace}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    node.until(lambda: node.status("plain").phase in {"Running", "Succeeded"}, lambda: str(node.status("plain")))
    # A pod with units waits for the extender, and for a node that has some.
    main = {"name": "main", "image": BOX, "resources": {"limits": {SHARES: "300"}}}
    metadata = {"name": "shares", "namespace": node.namespace}
    node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, "containers": [main]}})
    waits = "{.status.conditions[?(@.type=='PodScheduled')].message}"
    why = ("get", "pod", "shares", "-o", f"jsonpath={waits}")
    node.until(lambda: f"Insufficient {SHARES}" in node.kubectl(*why), lambda: node.kubectl(*why))
    for account, verb, what, may in RIGHTS:
        given = f"--as=system:serviceaccount:{NAMESPACE}:gpuvirt-{account}"
        resource, _, part = what.partition("/")
        asked = ("auth", "can-i", verb, resource, f"--subresource={part}", given, "-n", node.namespace)
        assert user.cluster.kubectl(*asked).stdout.strip() == may, (account, verb, what)
    user.uninstall(release)
    left = ("get", "configmap,deployment", "-n", NAMESPACE, "-o", "name")
    node.until(lambda: "gpuvirt" not in user.kubectl(*left), lambda: user.kubectl(*left))
