"""The chart on a real API server, with our image: installed, upgraded and uninstalled as its users do."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from lab.cluster.cluster import Cluster
from lab.cluster.helm import helm as built
from lab.cluster.images import PREFIX
from lab.cluster.ourimage import NAME

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.ring("helm"), pytest.mark.xdist_group("cluster")]

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/chart"
NAMESPACE = "gpu-operator"
KINDS = {"clusterpolicies.nvidia.com", "gpunodes.gpuvirt.io"}
NOT_LOOKED_AT = ("apiservices", "certificatesigningrequests", "componentstatuses")
"""Kinds whose objects others make: one APIService a group of kinds, for instance."""


@dataclass(frozen=True, slots=True)
class Install:
    """A user with helm and kubectl."""

    cluster: Cluster
    helm: Path

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        done = self.cluster.kubectl(*arguments, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run helm."""
        environment = os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)}  # noqa: TID251  helm's own
        command = [str(self.helm), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    def must(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, f"{done.stderr}\n{self.pods()}"
        return done.stdout

    def pods(self) -> str:
        """What is to be seen of the pods when something went wrong."""
        logs = Path("/var/log/pods").glob(f"{NAMESPACE}_*/*/*.log")
        said = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs)
        return self.cluster.kubectl("get", "pods", "-n", NAMESPACE, "-o", "wide").stdout + said

    def install(self, *values: str) -> "subprocess.CompletedProcess[str]":
        """Install as seed users do, with the lab's image."""
        repository, _, tag = f"{PREFIX}/{NAME}".rpartition(":")
        image = (f"image.repository={repository}", f"image.tag={tag}", "image.pullPolicy=Never")
        options = ["--wait", "--timeout=120s", "--generate-name", "-n", NAMESPACE, "--create-namespace"]
        return self.run("install", *options, str(CHART), *(f"--set={one}" for one in (*image, *values)))

    def releases(self) -> list[str]:
        """Return the names of all releases, failed ones too."""
        return self.must("list", "-n", NAMESPACE, "--short").split()

    def cluster_wide(self) -> set[str]:
        """Return the names of all objects that are in no namespace."""
        kinds = self.kubectl("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").split()
        chosen = [kind for kind in kinds if not kind.startswith(NOT_LOOKED_AT)]
        return set(self.kubectl("get", ",".join(chosen), "-o", "name").split())

    def crd(self, name: str, path: str) -> str:
        return self.kubectl("get", "crd", name, "-o", f"jsonpath={{{path}}}")


@pytest.fixture
def user(lab: Cluster, image: None) -> Iterator[Install]:  # noqa: ARG001
    """Give a cluster that has nothing of ours."""
    user = Install(lab, built())
    for manifest in ("node.yaml", "discover.yaml"):
        lab.kubectl("delete", "-f", str(ROOT / "deploy" / manifest), "--ignore-not-found", "--wait=true")
    lab.kubectl("delete", "crd", *KINDS, "--ignore-not-found", "--wait=true")
    yield user
    for release in user.releases():
        user.run("uninstall", release, "-n", NAMESPACE, "--no-hooks", "--wait")
    lab.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=true")
    lab.kubectl("delete", "crd", *KINDS, "--ignore-not-found", "--wait=true")


def older(name: str) -> str:
    """Return a kind of ours as an older release might have left it: without what its columns print."""
    manifest = yaml.safe_load((ROOT / "deploy" / name).read_text())
    manifest["metadata"].pop("labels")
    manifest["spec"]["versions"][0].pop("additionalPrinterColumns")
    return yaml.safe_dump(manifest)


def test_installed_upgraded_and_gone(user: Install) -> None:
    # What an older release has left: a kind, and an object of it.
    user.kubectl("apply", "-f", "-", given=older("gpunodes.yaml"))
    user.kubectl("wait", "--for=condition=Established", "crd", "gpunodes.gpuvirt.io", "--timeout=60s")
    kept = "{apiVersion: gpuvirt.io/v1alpha1, kind: GpuNode, metadata: {name: elsewhere}, spec: {mode: passthrough}}"
    user.kubectl("apply", "-f", "-", given=kept)
    before = user.cluster_wide()

    done = user.install("sandboxWorkloads.enabled=true")
    assert done.returncode == 0, f"{done.stderr}\n{user.pods()}"
    assert "kubectl get gpunodes" in done.stdout
    (release,) = user.releases()
    columns = ".spec.versions[0].additionalPrinterColumns[*].name"
    assert "Modes" in user.crd("gpunodes.gpuvirt.io", columns).split(), "brought up to date"
    assert user.kubectl("get", "gpunode", "elsewhere", "-o", "jsonpath={.spec.mode}") == "passthrough"
    ready = user.kubectl("get", "clusterpolicy", "cluster-policy", "-o", "jsonpath={.spec.sandboxWorkloads.enabled}")
    assert ready == "true"
    user.kubectl("wait", "--for=create", "daemonset/gpuvirt-node", "-n", NAMESPACE, "--timeout=60s")
    for verb, what in (("get", "secrets"), ("create", "pods"), ("patch", "customresourcedefinitions")):
        account = f"--as=system:serviceaccount:{NAMESPACE}:gpuvirt-controller"
        assert user.cluster.kubectl("auth", "can-i", verb, what, "-n", NAMESPACE, account).stdout.strip() == "no"

    # A kind that is not there any more comes back with an upgrade, and the values reach the policy.
    user.kubectl("delete", "crd", "gpunodes.gpuvirt.io", "--wait=true")
    before.remove("gpunode.gpuvirt.io/elsewhere")
    manager = ("enabled=true", "repository=registry.example/own", "version=510.73.06", "imagePullSecrets={name}")
    values = ("operator.replicas=2", "psa.enabled=true", *(f"vgpuManager.{one}" for one in manager))
    sets = [f"--set={one}" for one in values]
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
    assert second.returncode != 0, "there is one gpuvirt a cluster"
    assert user.releases() == [release]

    user.must("uninstall", release, "-n", NAMESPACE, "--wait", "--timeout=200s")
    kinds = {f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in KINDS}
    assert user.cluster_wide() - before <= kinds | {f"namespace/{NAMESPACE}"}
    assert user.kubectl("get", "daemonsets,services,roles,rolebindings", "-n", NAMESPACE, "-o", "name") == ""

    # What was left is taken over by a release of another name.
    again = user.install("sandboxWorkloads.enabled=true")
    assert again.returncode == 0, f"{again.stderr}\n{user.pods()}"
    # Soon, though the uninstall keeps controllers from leading for minutes.
    user.kubectl("wait", "--for=create", "daemonset/gpuvirt-node", "-n", NAMESPACE, "--timeout=60s")


def test_what_is_of_nvidias_operator_is_left_as_it_is(user: Install) -> None:
    user.kubectl("apply", "-f", "-", given=older("clusterpolicies.yaml"))
    user.kubectl("wait", "--for=condition=Established", "crd", "clusterpolicies.nvidia.com", "--timeout=60s")
    policy = (ROOT / "tests/apiserver/seedpolicy.yaml").read_text()
    user.kubectl("apply", "-f", "-", given=policy)
    refused = user.install("sandboxWorkloads.enabled=true")
    assert refused.returncode != 0
    # Helm prints what the Job said, but for here: the lab's node has a name that is not to be resolved.
    assert "ClusterPolicy cluster-policy: $.metadata.labels: is another installation's" in user.pods()
    assert "to have it written from the chart's values: kubectl label" in user.pods()
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
