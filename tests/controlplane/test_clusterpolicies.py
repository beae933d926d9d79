"""ClusterPolicy on a real API server: accepted, kept and refused fields, and the error texts."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, StoredPolicy, plain_spec, read_policy
from gpuvirt.plain import Plain
from tests.cluster.apilab import ApiLab
from tests.cluster.labnamespace import LabNamespace
from tests.pristine import clear

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

ROOT = Path(__file__).parent.parent.parent
KIND = "clusterpolicies.nvidia.com"
GIVEN = ROOT / "tests/kube"
INCOMPLETE = "an image needs all of repository, image and version"


@pytest.fixture(scope="module")
def policies(running_lab: PlayedCluster, tmp_path_factory: pytest.TempPathFactory) -> ApiLab:
    """An API server with the ClusterPolicy kind and the policy of the GPU Operator's guide."""
    clear(running_lab)
    api = ApiLab(running_lab, tmp_path_factory.mktemp("policies"))
    api.kubectl("apply", "-f", str(ROOT / "deploy/clusterpolicies.yaml"))
    served = LabNamespace(running_lab, "default")
    served.until(lambda: running_lab.kubectl("get", KIND).returncode == 0, lambda: "the kind is not served yet")
    api.kubectl("apply", "--validate=strict", "-f", str(GIVEN / "guidepolicy.yaml"))
    return api


def refusal(api: ApiLab, spec: object) -> str:
    """Return the API server's refusal of a spec that is merged into the guide's policy."""
    patch = ("--type=merge", "--dry-run=server", "-p", json.dumps({"spec": spec}))
    done = api.cluster.kubectl("patch", "clusterpolicy", "cluster-policy", *patch)
    return done.stderr if done.returncode else ""


def stored(api: ApiLab, name: str) -> StoredPolicy:
    return msgspec.json.decode(api.kubectl("get", "clusterpolicy", name, "-o", "json"), type=StoredPolicy)


def test_every_known_field_is_accepted_and_fields_of_newer_versions_are_kept(policies: ApiLab) -> None:
    given = yaml.safe_load((GIVEN / "fullpolicy.yaml").read_text())
    given["metadata"]["name"] = "full"
    policies.kubectl("apply", "--validate=strict", "-f", "-", given=yaml.safe_dump(given))
    found = stored(policies, "full")
    # The API server drops null if the field is not nullable.
    del given["spec"]["daemonsets"]["tolerations"][0]["tolerationSeconds"]
    assert plain_spec(found) == given["spec"]
    assert isinstance(read_policy(found), ClusterPolicy)
    assert found.metadata.creation_timestamp.endswith("Z")
    policies.kubectl("delete", "clusterpolicy", "full")


def test_the_guides_values_are_accepted_and_printed(policies: ApiLab) -> None:
    policy = read_policy(stored(policies, "cluster-policy"))
    assert isinstance(policy, ClusterPolicy)
    assert policy.spec.vgpu_manager.version == "510.73.06"
    status = '{"status": {"state": "ready", "namespace": "gpu-operator", "nodes": {"total": 3}}}'
    policies.kubectl("patch", "clusterpolicy", "cluster-policy", "--subresource=status", "--type=merge", "-p", status)
    header, row = (line.split() for line in policies.kubectl("get", "clusterpolicies").splitlines())
    assert header == ["NAME", "STATUS", "AGE"]
    assert row[:2] == ["cluster-policy", "ready"]
    assert "vGPU" in policies.kubectl("explain", "clusterpolicy.spec.vgpuManager")


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        ({"sandboxWorkloads": {"mode": "xen"}}, 'Unsupported value: "xen"'),
        ({"sandboxWorkloads": {"defaultWorkload": "vm"}}, 'Unsupported value: "vm"'),
        ({"ccManager": {"defaultMode": "maybe"}}, 'Unsupported value: "maybe"'),
        ({"mig": {"strategy": "all"}}, 'Unsupported value: "all"'),
        ({"driver": {"kernelModuleType": "closed"}}, 'Unsupported value: "closed"'),
        ({"daemonsets": {"updateStrategy": "Recreate"}}, 'Unsupported value: "Recreate"'),
        ({"daemonsets": {"rollingUpdate": {"maxUnavailable": "all"}}}, "expected a number of nodes, as 1"),
        ({"daemonsets": {"rollingUpdate": {"maxUnavailable": "0"}}}, "expected a number of nodes, as 1"),
        ({"daemonsets": {"rollingUpdate": {"maxUnavailable": "120%"}}}, "expected a number of nodes, as 1"),
        ({"vgpuManager": {"repository": None}}, INCOMPLETE),
        ({"vgpuManager": {"version": ""}}, INCOMPLETE),
        ({"vgpuManager": {"repository": None, "version": None}}, "the vGPU manager is an image of your own"),
        ({"driver": {"version": "580"}}, INCOMPLETE),
        ({"toolkit": {"repository": "registry.example"}}, INCOMPLETE),
        ({"gfd": {"version": "1", "image": "gfd"}}, INCOMPLETE),
        ({"driver": {"image": ""}}, "should match"),
        ({"vfioManager": {"resources": {"limits": {"memory": "much"}}}}, "should match"),
        ({"cdi": {"nriPluginEnabled": True, "enabled": False}}, "cdi.nriPluginEnabled needs cdi.enabled and toolkit"),
        ({"cdi": {"nriPluginEnabled": True}, "toolkit": {"enabled": False}}, "needs cdi.enabled and toolkit.enabled"),
        ({"daemonsets": None}, "daemonsets: Required value"),
        ({"vgpuManager": {"env": [{"value": "x"}]}}, "name: Required value"),
    ],
)
def test_an_invalid_spec_is_refused_with_the_fix(policies: ApiLab, spec: Plain, reported: str) -> None:
    assert reported in refusal(policies, spec)


@pytest.mark.parametrize(
    "spec",
    [
        {"sandboxWorkloads": {"mode": "kubevirt"}},
        {"daemonsets": {"rollingUpdate": {"maxUnavailable": "100%"}}},
        {"daemonsets": {"rollingUpdate": {"maxUnavailable": ""}}},
        {"vgpuManager": {"repository": None, "version": None, "image": "registry.example/vgpu-manager@sha256:00"}},
        {"vgpuManager": {"repository": None, "version": None, "image": None}},
        {"vgpuManager": {"enabled": False, "version": None}},
        {"driver": {"enabled": False, "version": "580"}},
        {"driver": {"repository": "registry.example", "image": "driver", "version": "580", "enabled": None}},
        {"cdi": {"nriPluginEnabled": True}},
        {"vfioManager": {"version": "v0.12.0"}},
        {"vfioManager": {"resources": {"limits": {"cpu": 1, "memory": "1.5Gi", "example.com/x": "2e3"}}}},
    ],
)
def test_a_valid_spec_is_accepted(policies: ApiLab, spec: Plain) -> None:
    assert refusal(policies, spec) == ""


def test_a_misspelt_field_of_the_vm_components_is_reported_by_kubectl(policies: ApiLab) -> None:
    given = yaml.safe_load((GIVEN / "guidepolicy.yaml").read_text())
    given["spec"]["sandboxWorkloads"]["defaultWorkloads"] = "vm-vgpu"
    done = policies.cluster.kubectl("apply", "--dry-run=server", "-f", "-", given=yaml.safe_dump(given))
    assert 'unknown field "spec.sandboxWorkloads.defaultWorkloads"' in done.stderr
