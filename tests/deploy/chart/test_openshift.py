"""On OpenShift, each pod is admitted by an SCC that permits no more than its account's pods request.

No OpenShift runs here: helm renders the chart with OpenShift's API, and `securitycontexts` applies the rules of its
admission.
"""

from collections.abc import Mapping

import pytest
import yaml
from msgspec.structs import replace

from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.workloads import DaemonSet, encoded
from gpuvirt.plain import Plain
from tests.controller.operands.operandaccounts import NAMES
from tests.controller.operands.policies import ALL_KINDS, full, policy_of
from tests.deploy.chart.helmchart import NAMESPACE, Helm, Manifest, Rendered, at, items
from tests.deploy.chart.securitycontexts import OF_THE_HOST, RESTRICTED, refusals

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

OPENSHIFT = ("--api-versions", "security.openshift.io/v1")
ALL = (
    *("extender.enabled=true", "scheduler.enabled=true", "psa.enabled=true", "operator.labelVgpuTypes=true"),
    *("webhook.enabled=true", "webhook.config.classes.kata.profile=hot-plug"),
)
INPUTS = replace(ALL_KINDS, settings=replace(ALL_KINDS.settings, namespace=NAMESPACE, namespace_sets_uid=True))
KIND = "SecurityContextConstraints"
NETWORKED = (
    *("sandboxDevicePlugin", "vgpuManager", "driver", "toolkit", "validator"),
    *("devicePlugin", "gfd", "dcgm", "dcgmExporter"),
)


def rendered(helm: Helm, *values: str) -> Rendered:
    return helm.template(*ALL, *values, options=OPENSHIFT)


def by_account(found: Rendered) -> dict[str, Manifest]:
    """Return the SCCs by the one account that each is for."""
    accounts = {}
    for scc in found.named(KIND).values():
        (user,) = items(at(scc, "users"))
        assert items(at(scc, "groups")) == []
        accounts[str(user)] = scc
    return accounts


def operands(policy: ClusterPolicy) -> dict[str, Plain]:
    """Return the specs of the pods that the controller deploys, by DaemonSet."""
    sets = [manifest for manifest in render(policy, INPUTS).manifests if isinstance(manifest, DaemonSet)]
    return {label.metadata.name: at(yaml.safe_load(encoded(label)), "spec", "template", "spec") for label in sets}


def user_of(pod: Plain) -> str:
    return f"system:serviceaccount:{NAMESPACE}:{at(pod, 'serviceAccountName')}"


def test_only_openshift_gets_constraints(helm: Helm) -> None:
    plain = helm.template(*ALL)
    assert not plain.named(KIND)
    assert at(plain.pods()["gpuvirt-controller"], "securityContext", "runAsUser") == 65532
    arguments = items(at(plain.pods()["gpuvirt-controller"], "containers", 0, "args"))
    assert "--namespace-sets-uid" not in arguments


def test_constraints_are_for_our_accounts_alone(helm: Helm) -> None:
    found = rendered(helm)
    accounts = {f"system:serviceaccount:{NAMESPACE}:{name}" for name in (*NAMES, "gpuvirt-node", "gpuvirt-discover")}
    assert set(by_account(found)) == accounts
    assert accounts <= {f"system:serviceaccount:{NAMESPACE}:{name}" for name in found.named("ServiceAccount")}
    assert "gpuvirt-discover" not in rendered(helm, "discover.enabled=false").named(KIND)


def test_the_charts_unprivileged_pods_need_no_constraints_of_their_own(helm: Helm) -> None:
    pods = rendered(helm).pods()
    assert {"gpuvirt-controller", "gpuvirt-extender", "gpuvirt-scheduler", "gpuvirt-crds", "gpuvirt-uninstall"} < set(
        pods
    )
    pods = {**pods, "gpuvirt-test": at(rendered(helm).one("Pod", "gpuvirt-test"), "spec")}
    refused = {name: refusals(RESTRICTED, pod) for name, pod in pods.items()}
    assert {name for name, why in refused.items() if why} == {"gpuvirt-discover"}


def test_the_discoverer_is_admitted_by_its_own(helm: Helm) -> None:
    found = rendered(helm)
    pod = found.pods()["gpuvirt-discover"]
    assert refusals(RESTRICTED, pod) == {"volumes", "allowHostDirVolumePlugin"}
    assert refusals(by_account(found)[user_of(pod)], pod) == set()


def test_each_operand_is_admitted_by_the_constraints_of_its_account(helm: Helm) -> None:
    accounts, pods = by_account(rendered(helm)), operands(full())
    refused = {name: refusals(accounts[user_of(pod)], pod) for name, pod in pods.items()}
    # Unprivileged: restricted-v2 admits it, although its account has an SCC for the agent.
    assert refusals(RESTRICTED, pods["gpuvirt-node-labels"]) == set()
    del refused["gpuvirt-node-labels"]
    assert len(refused) == len(NAMES) + 2, "a driver for each of two operating systems"
    assert {name: why for name, why in refused.items() if why} == {}
    assert {user_of(pod) for pod in pods.values()} | {f"system:serviceaccount:{NAMESPACE}:gpuvirt-discover"} == set(
        accounts
    )


def with_less(scc: Manifest) -> Mapping[str, Manifest]:
    """Return an SCC without each of its rights in turn."""
    flags = ("allowPrivilegedContainer", "allowHostDirVolumePlugin", *OF_THE_HOST.values())
    less: dict[str, Manifest] = {flag: {**scc, flag: False} for flag in flags if scc[flag]}
    kinds = items(at(scc, "volumes"))
    for kind in kinds:
        less[str(kind)] = {**scc, "volumes": [volume for volume in kinds if volume != kind]}
    if not scc["readOnlyRootFilesystem"]:
        less["readOnlyRootFilesystem"] = {**scc, "readOnlyRootFilesystem": True}
    return less


def test_no_account_may_more_than_its_pods_request(helm: Helm) -> None:
    found = rendered(helm)
    pods = [*operands(full()).values(), found.pods()["gpuvirt-discover"]]
    needless = [
        (user, right)
        for user, scc in by_account(found).items()
        for right, less in with_less(scc).items()
        if not any(refusals(less, pod) for pod in pods if user_of(pod) == user)
    ]
    assert needless == []


def test_the_hosts_network_is_permitted_where_the_values_set_it(helm: Helm) -> None:
    spec = {part: {"hostNetwork": True, "repository": "r", "image": "i", "version": "1"} for part in NETWORKED}
    for part in ("sandboxDevicePlugin", "validator"):
        spec[part] = {"hostNetwork": True}
    spec["driver"]["manager"] = spec["driver"] | {"hostNetwork": False}
    spec["vgpuManager"]["enabled"] = True
    pods = operands(policy_of({"sandboxWorkloads": {"enabled": True}, **spec}))
    pods.pop("gpuvirt-node-labels")
    assert len(pods) == len(NAMES) + 2
    without, permitted = (
        by_account(rendered(helm, *(f"{part}.hostNetwork={value}" for part in NETWORKED)))
        for value in ("false", "true")
    )
    for name, pod in pods.items():
        assert "allowHostNetwork" in refusals(without[user_of(pod)], pod), name
        assert refusals(permitted[user_of(pod)], pod) == set(), name


def test_the_controller_sets_no_uid_either(helm: Helm) -> None:
    arguments = items(at(rendered(helm).pods()["gpuvirt-controller"], "containers", 0, "args"))
    assert "--namespace-sets-uid" in arguments
    plain = replace(INPUTS, settings=replace(INPUTS.settings, namespace_sets_uid=False))
    (labels,) = (
        manifest for manifest in render(full(), plain).manifests if manifest.metadata.name == "gpuvirt-node-labels"
    )
    pod = at(yaml.safe_load(encoded(labels)), "spec", "template", "spec")
    assert refusals(RESTRICTED, pod) == {"runAsUser"}
