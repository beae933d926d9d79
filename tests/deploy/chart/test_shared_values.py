"""Values for all objects: names, labels, pull Secrets, and what Jobs and the discoverer's pods get."""

from collections.abc import Iterator

import pytest

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import NAMESPACE, Helm, Manifest, at, items

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

ALL = (
    *("extender.enabled=true", "scheduler.enabled=true", "psa.enabled=true", "operator.replicas=2"),
    *("webhook.enabled=true", "webhook.config.classes.kata.profile=hot-plug"),
    *("sandboxWorkloads.enabled=true", "operator.cleanupCRD=true"),
)
OPENSHIFT = ("--api-versions", "security.openshift.io/v1")
JOBS = {"gpuvirt-crds", "gpuvirt-namespace", "gpuvirt-policy", "gpuvirt-uninstall"}


def labels_of(manifest: Manifest) -> Iterator[Plain]:
    """Yield the labels of an object, and of its pods."""
    yield at(manifest, "metadata", "labels")
    if at(manifest, "spec", "template") is not None:
        yield at(manifest, "spec", "template", "metadata", "labels")


def references(manifest: Manifest) -> Iterator[str]:
    """Yield the accounts that an object names."""
    for subject in items(at(manifest, "subjects")):
        yield str(at(subject, "name"))
    account = at(manifest, "spec", "template", "spec", "serviceAccountName")
    if account is not None:
        yield str(account)


def test_common_labels_are_on_all_objects_and_pods_and_select_none(helm: Helm) -> None:
    rendered = helm.template(*ALL, "commonLabels.team=ml", "operator.labels.team=own", options=OPENSHIFT)
    plain = helm.template(*ALL, options=OPENSHIFT)
    assert len(rendered.manifests) == len(plain.manifests)
    without = [
        manifest for manifest in rendered.manifests if any(at(labels, "team") is None for labels in labels_of(manifest))
    ]
    assert [(manifest["kind"], at(manifest, "metadata", "name")) for manifest in without] == []
    for manifest, before in zip(rendered.manifests, plain.manifests, strict=True):
        assert at(manifest, "spec", "selector") == at(before, "spec", "selector")
    pod = at(rendered.one("Deployment", "gpuvirt-controller"), "spec", "template", "metadata", "labels")
    assert (at(pod, "team"), at(pod, "app.kubernetes.io/name")) == ("own", "gpuvirt"), "the nearer value wins"


def test_common_labels_reach_the_pods_of_the_controller(helm: Helm) -> None:
    policy = helm.template("commonLabels.team=ml", "commonLabels.a=b", "daemonsets.labels.a=own").policy
    assert at(policy, "spec", "daemonsets", "labels") == {"team": "ml", "a": "own"}


@pytest.mark.parametrize("key", [r"app\.kubernetes\.io/name", "app", r"gpuvirt\.io/x", r"helm\.sh/chart"])
def test_common_labels_replace_none_by_which_programs_select(helm: Helm, key: str) -> None:
    name = key.replace("\\", "")
    assert f"invalid propertyName '{name}'" in helm.refusal(f"commonLabels.{key}=mine")


@pytest.mark.parametrize("key", ["fullnameOverride", "nameOverride"])
def test_names_begin_with_the_override(helm: Helm, key: str) -> None:
    found = helm.template(*ALL, f"{key}=team-gpu")
    names = {(str(manifest["kind"]), str(at(manifest, "metadata", "name"))) for manifest in found.manifests}
    plain = {
        (str(manifest["kind"]), str(at(manifest, "metadata", "name"))) for manifest in helm.template(*ALL).manifests
    }
    assert {("Deployment", "team-gpu-controller"), ("DaemonSet", "team-gpu-discover"), ("Job", "team-gpu-crds")} < names
    renamed = {(kind, name.replace("team-gpu-", "gpuvirt-")) for kind, name in names}
    assert renamed == plain, "nothing else changes"
    accounts = set(found.named("ServiceAccount"))
    assert {name for manifest in found.manifests for name in references(manifest)} <= accounts
    policy = found.one("ValidatingAdmissionPolicy", "team-gpu-discover")
    user = f'"system:serviceaccount:{NAMESPACE}:team-gpu-discover"'
    assert user in str(at(policy, "spec", "matchConditions", 0, "expression"))
    binding = found.one("ValidatingAdmissionPolicyBinding", "team-gpu-discover")
    assert at(binding, "spec", "policyName") == "team-gpu-discover"
    volumes = items(at(found.pods()["team-gpu-crds"], "volumes"))
    assert at(volumes, 0) is not None
    assert {at(volume, "configMap", "name") for volume in volumes} <= set(found.named("ConfigMap"))
    assert "gpuvirt-node" in accounts, "the controller's DaemonSet has this account"
    lease = [rule for rule in items(at(found.one("Role", "team-gpu-controller"), "rules")) if "leases" in str(rule)]
    assert "gpuvirt-controller" in str(lease), "controllers elect their leader by this name"


def test_the_full_name_goes_before_the_name(helm: Helm) -> None:
    found = helm.template("fullnameOverride=full", "nameOverride=short")
    assert "full-controller" in found.named("Deployment")


@pytest.mark.parametrize("name", ["Upper", "1st", "a-", "x" * 41])
def test_a_name_that_no_object_can_have_is_refused(helm: Helm, name: str) -> None:
    assert "/fullnameOverride" in helm.refusal(f"fullnameOverride={name}")


def test_global_secrets_pull_all_images(helm: Helm) -> None:
    both = (
        "image.pullSecrets={mine,shared}",
        "global.imagePullSecrets[0]=shared",
        "global.imagePullSecrets[1].name=third",
    )
    rendered = helm.template(*ALL, *both)
    expected = [{"name": name} for name in ("mine", "shared", "third")]
    ours = {
        name: at(account, "imagePullSecrets")
        for name, account in rendered.named("ServiceAccount").items()
        if name.startswith("gpuvirt-")
    }
    assert len(ours) == 9
    assert {name for name, found in ours.items() if found != expected} == set()
    variables = items(at(rendered.pods()["gpuvirt-controller"], "containers", 0, "env"))
    assert {"name": "GPUVIRT_IMAGE_PULL_SECRETS", "value": "mine shared third"} in variables
    assert "/global/imagePullSecrets/0" in helm.refusal("global.imagePullSecrets[0].nmae=x")


def test_jobs_and_the_discoverer_have_a_priority_and_resources_of_the_values(helm: Helm) -> None:
    limits = ("discover.resources.limits.memory=99Mi", "jobs.resources.limits.memory=77Mi")
    rendered = helm.template(*ALL, *limits, "discover.priorityClassName=high", "jobs.priorityClassName=low")
    pods = rendered.pods()
    expected = {"gpuvirt-discover": ("high", "99Mi")} | dict.fromkeys(JOBS, ("low", "77Mi"))
    for name, (priority, memory) in expected.items():
        assert at(pods[name], "priorityClassName") == priority
        assert at(pods[name], "containers", 0, "resources", "limits", "memory") == memory
    plain = helm.template(*ALL).pods()
    assert not any("priorityClassName" in str(plain[name]) for name in expected)


def test_a_node_selector_of_all_daemon_sets_is_refused(helm: Helm) -> None:
    refused = helm.refusal("daemonsets.nodeSelector.a=b")
    assert "/daemonsets" in refused
    assert "nodeSelector" in refused
