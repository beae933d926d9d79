"""The chart on a real API server, with our image: install, upgrade and uninstall."""

import time

import pytest

from tests.cluster.chartlab import CHART, KINDS, NAMESPACE, ROOT, Install, older

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("helm"), pytest.mark.xdist_group("cluster")]


def until_known(user: Install, kind: str) -> None:
    """Wait until a kind is served; `kubectl wait` fails on a kind without conditions."""
    for _ in range(120):
        if user.cluster.kubectl("wait", "--for=condition=Established", "crd", kind, "--timeout=1s").returncode == 0:
            return
        time.sleep(0.2)  # noqa: TID251  other programs' time
    raise AssertionError(f"{kind} is not served")


def test_a_release_is_installed_upgraded_and_uninstalled(user: Install) -> None:
    # An older release left a kind, and an object of the kind.
    user.kubectl("apply", "-f", "-", given=older("gpunodes.yaml"))
    until_known(user, "gpunodes.gpuvirt.io")
    kept = "{apiVersion: gpuvirt.io/v1alpha1, kind: GpuNode, metadata: {name: elsewhere}, spec: {mode: passthrough}}"
    user.kubectl("apply", "-f", "-", given=kept)
    before = user.cluster_wide()

    done = user.install("sandboxWorkloads.enabled=true")
    assert done.returncode == 0, f"{done.stderr}\n{user.pods()}"
    assert "kubectl get gpunodes" in done.stdout
    (release,) = user.releases()
    columns = ".spec.versions[0].additionalPrinterColumns[*].name"
    assert "Modes" in user.crd("gpunodes.gpuvirt.io", columns).split(), "the kind was updated"
    assert user.kubectl("get", "gpunode", "elsewhere", "-o", "jsonpath={.spec.mode}") == "passthrough"
    ready = user.kubectl("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.spec.sandboxWorkloads.enabled}")
    assert ready == "true"
    user.kubectl("wait", "--for=create", "daemonset/gpuvirt-node", "-n", NAMESPACE, "--timeout=60s")
    for verb, what in (("get", "secrets"), ("create", "pods"), ("patch", "customresourcedefinitions")):
        account = f"--as=system:serviceaccount:{NAMESPACE}:gpuvirt-controller"
        assert user.cluster.kubectl("auth", "can-i", verb, what, "-n", NAMESPACE, account).stdout.strip() == "no"

    # An upgrade recreates a deleted kind, and the values reach the policy.
    user.kubectl("delete", "crd", "gpunodes.gpuvirt.io", "--wait=true")
    before.remove("gpunode.gpuvirt.io/elsewhere")
    manager = ("enabled=true", "repository=registry.example/own", "version=510.73.06", "imagePullSecrets={name}")
    values = ("operator.replicas=2", "psa.enabled=true", *(f"vgpuManager.{value}" for value in manager))
    sets = [f"--set={value}" for value in values]
    user.must(
        "upgrade", release, str(CHART), "-n", NAMESPACE, "--wait", "--timeout=120s", "--reset-then-reuse-values", *sets
    )
    assert user.crd("gpunodes.gpuvirt.io", ".metadata.labels") == '{"app.kubernetes.io/part-of":"gpuvirt"}'
    assert '"pod-security.kubernetes.io/enforce":"privileged"' in user.kubectl(
        "get", "namespace", NAMESPACE, "-o", "jsonpath={.metadata.labels}"
    )
    secrets = user.kubectl("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.spec.vgpuManager}")
    assert '"imagePullSecrets":["name"]' in secrets
    deployed = ("get", "deployment", "gpuvirt-controller", "-n", NAMESPACE, "-o", "jsonpath={.status.readyReplicas}")
    assert user.kubectl(*deployed) == "2"
    assert "gpuvirt-controller" in user.kubectl("get", "pdb", "-n", NAMESPACE, "-o", "name")

    second = user.install()
    assert second.returncode != 0, "a cluster has a single gpuvirt"
    assert user.releases() == [release]

    user.must("uninstall", release, "-n", NAMESPACE, "--wait", "--timeout=200s")
    kinds = {f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in KINDS}
    assert user.cluster_wide() - before <= kinds | {f"namespace/{NAMESPACE}"}
    assert user.kubectl("get", "daemonsets,services,roles,rolebindings", "-n", NAMESPACE, "-o", "name") == ""

    # A release of another name adopts the remaining objects.
    again = user.install("sandboxWorkloads.enabled=true")
    assert again.returncode == 0, f"{again.stderr}\n{user.pods()}"
    # Soon, although the uninstall prevents controllers from leading for minutes.
    user.kubectl("wait", "--for=create", "daemonset/gpuvirt-node", "-n", NAMESPACE, "--timeout=60s")


def test_objects_of_nvidias_operator_are_left_unchanged(user: Install) -> None:
    user.kubectl("apply", "-f", "-", given=older("clusterpolicies.yaml"))
    until_known(user, "clusterpolicies.nvidia.com")
    policy = (ROOT / "tests/kube/guidepolicy.yaml").read_text()
    user.kubectl("apply", "-f", "-", given=policy)
    refused = user.install("sandboxWorkloads.enabled=true")
    assert refused.returncode != 0
    # Helm usually prints the Job's log. Not here: the name of the lab's node cannot be resolved.
    assert "ClusterPolicy cluster-policy: $.metadata.labels: belongs to another installation" in user.pods()
    assert "to let this one write it from the chart's values: kubectl label" in user.pods()
    user.must("uninstall", *user.releases(), "-n", NAMESPACE, "--wait", "--no-hooks")
    spec = user.kubectl("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.spec.vgpuManager.version}")
    assert spec == "510.73.06"

    before = user.crd("clusterpolicies.nvidia.com", ".metadata.generation")
    strict = "pod-security.kubernetes.io/enforce=restricted"
    user.kubectl("label", "namespace", NAMESPACE, strict)
    done = user.install("sandboxWorkloads.enabled=true", "clusterPolicy.deployCR=false", "discover.enabled=false")
    assert done.returncode == 0, f"{done.stderr}\n{user.pods()}"
    assert user.crd("clusterpolicies.nvidia.com", ".metadata.generation") == before
    assert user.crd("clusterpolicies.nvidia.com", ".metadata.labels") == ""
