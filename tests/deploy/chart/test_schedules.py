"""The chart's objects for VgpuSchedules: the controller's option, its further rights, its way to hypervisors."""

from collections.abc import Iterator

import pytest

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import NAMESPACE, Helm, Rendered, at, items

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

ON = "schedule.enabled=true"
NAME = "gpuvirt-schedules"
RIGHTS = {
    ("gpuvirt.io", "gpunodes", "get"),
    ("policy", "poddisruptionbudgets", "list"),
    ("", "nodes", "get"),
    ("", "pods", "list"),
    ("", "pods", "delete"),
    ("", "pods/eviction", "create"),
    ("storage.k8s.io", "volumeattachments", "list"),
    (f"{NAMESPACE}: gpuvirt.io", "vgpuschedules", "get"),
    ("", "configmaps cluster-autoscaler-status", "list"),
    ("cluster.x-k8s.io", "machines", "get"),
    ("cluster.x-k8s.io", "machinehealthchecks", "list"),
    ("machine.openshift.io", "machines", "get"),
    ("machine.openshift.io", "machinehealthchecks", "list"),
    ("gpuvirt.io", "vgpuschedules", "list"),
    ("gpuvirt.io", "vgpuschedules", "watch"),
    ("gpuvirt.io", "vgpuschedules/status", "patch"),
    (f"{NAMESPACE}: events.k8s.io", "events", "create"),
    (f"{NAMESPACE}: ", "secrets", "get"),
    ("kube-node-lease: coordination.k8s.io", "leases", "get"),
}
"""Namespace and group, resource with its name where that is the only one, verb."""


def granted(rendered: Rendered) -> Iterator[tuple[str, str, str]]:
    """Yield the rights of the roles for schedules."""
    for manifest in rendered.manifests:
        if at(manifest, "metadata", "name") != NAME or manifest["kind"] not in {"ClusterRole", "Role"}:
            continue
        namespace = at(manifest, "metadata", "namespace")
        place = f"{namespace}: " if namespace else ""
        for rule in items(at(manifest, "rules")):
            names = at(rule, "resourceNames")
            only = f" {items(names)[0]}" if names else ""
            for group in items(at(rule, "apiGroups")):
                for resource in items(at(rule, "resources")):
                    for verb in items(at(rule, "verbs")):
                        yield f"{place}{group}", f"{resource}{only}", str(verb)


def arguments(rendered: Rendered) -> list[Plain]:
    return items(at(rendered.pods()["gpuvirt-controller"], "containers", 0, "args"))


def test_without_schedules_the_controller_gets_no_further_right(helm: Helm) -> None:
    rendered = helm.template()
    assert "--schedules" not in arguments(rendered)
    assert not [
        manifest for manifest in rendered.manifests if at(manifest, "metadata", "name") in {NAME, "gpuvirt-hypervisors"}
    ]


def test_with_schedules_the_controller_gets_these_rights_and_no_others(helm: Helm) -> None:
    rendered = helm.template(ON)
    assert "--schedules" in arguments(rendered)
    rights = list(granted(rendered))
    assert len(rights) == len(set(rights))
    assert set(rights) == RIGHTS


def test_rights_to_kubevirts_vms_are_given_in_named_namespaces_alone(helm: Helm) -> None:
    rendered = helm.template(ON, "schedule.kubeVirtNamespaces={workers,more}")
    found = [document for document in rendered.manifests if at(document, "metadata", "name") == f"{NAME}-kubevirt"]
    assert [(str(document["kind"]), at(document, "metadata", "namespace")) for document in found] == [
        ("Role", "workers"),
        ("Role", "more"),
        ("RoleBinding", "workers"),
        ("RoleBinding", "more"),
    ]
    rules = {
        (group, resource, verb)
        for rule in items(at(found[0], "rules"))
        for group in items(at(rule, "apiGroups"))
        for resource in items(at(rule, "resources"))
        for verb in items(at(rule, "verbs"))
    }
    assert rules == {
        ("kubevirt.io", "virtualmachines", "list"),
        ("kubevirt.io", "virtualmachines", "patch"),
        ("kubevirt.io", "virtualmachineinstances", "list"),
        ("kubevirt.io", "virtualmachines/status", "patch"),
        ("subresources.kubevirt.io", "virtualmachines/stop", "update"),
    }
    account = {"kind": "ServiceAccount", "name": "gpuvirt-controller", "namespace": NAMESPACE}
    assert at(found[2], "subjects") == [account]
    off = helm.template("schedule.kubeVirtNamespaces={workers}")
    assert not [document for document in off.manifests if at(document, "metadata", "name") == f"{NAME}-kubevirt"]


def test_each_role_for_schedules_is_bound_to_the_controller_alone(helm: Helm) -> None:
    rendered = helm.template(ON, "fullnameOverride=mine")
    bindings = [
        manifest
        for manifest in rendered.manifests
        if str(manifest["kind"]).endswith("RoleBinding") and at(manifest, "metadata", "name") == "mine-schedules"
    ]
    assert sorted(str(at(binding, "metadata", "namespace")) for binding in bindings) == [
        "None",
        NAMESPACE,
        "kube-node-lease",
    ]
    account = {"kind": "ServiceAccount", "name": "mine-controller", "namespace": NAMESPACE}
    for binding in bindings:
        assert at(binding, "subjects") == [account]
        assert at(binding, "roleRef", "kind") == str(binding["kind"]).removesuffix("Binding")
        assert at(binding, "roleRef", "name") == "mine-schedules"


def test_the_controller_may_connect_to_hypervisors(helm: Helm) -> None:
    found = helm.template(ON, "schedule.hypervisorPorts={8443}").one("NetworkPolicy", "gpuvirt-hypervisors")
    assert at(found, "spec", "podSelector", "matchLabels", "app.kubernetes.io/component") == "controller"
    assert (at(found, "spec", "policyTypes"), at(found, "spec", "ingress")) == (["Egress"], None)
    assert at(found, "spec", "egress") == [{"ports": [{"protocol": "TCP", "port": 8443}]}]
    assert "gpuvirt-hypervisors" not in helm.template(ON, "networkPolicy.enabled=false").named("NetworkPolicy")
