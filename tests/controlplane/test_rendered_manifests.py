"""A real API server accepts the manifests that a policy renders."""

import json
from pathlib import Path

import pytest
from lab.cluster.playedcluster import PlayedCluster
from lab.cluster.settings import NODE
from msgspec.structs import replace

from gpuvirt.controller.operands import bases
from gpuvirt.controller.operands.inputs import RenderInputs
from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.workloads import encoded
from tests.cli.commandline import ran
from tests.cluster.apilab import ApiLab
from tests.controller.operands.operandaccounts import access, objects
from tests.controller.operands.policies import ALL_KINDS, full, policy_of

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

NAMESPACE = "default"
INPUTS = replace(ALL_KINDS, settings=replace(ALL_KINDS.settings, namespace=NAMESPACE))
NRI = {
    "sandboxWorkloads": {"enabled": True},
    "sandboxDevicePlugin": {"shares": {"mps": {"enabled": True}}},
    "cdi": {"nriPluginEnabled": True},
    "hostPaths": {"rootFS": "/x"},
}
IMAGES = {
    f"{name}_IMAGE": "r/x:1"
    for name in ("DRIVER", "DRIVER_MANAGER", "CONTAINER_TOOLKIT", "DEVICE_PLUGIN", "DCGM", "DCGM_EXPORTER", "GFD")
}
STRICT = ("--server-side", "--dry-run=server", "--validate=strict", "--field-manager=gpuvirt")


def test_kubectl_takes_the_operands_manifests_as_they_are(lab: PlayedCluster, tmp_path: Path) -> None:
    reported = ApiLab(lab, tmp_path).kubectl("apply", *STRICT, "-f", str(bases.FOLDER))
    assert len(reported.splitlines()) == len(list(bases.FOLDER.iterdir()))


@pytest.mark.parametrize(
    ("policy", "inputs"),
    [
        (full(), INPUTS),
        (policy_of({}), replace(INPUTS, settings=replace(INPUTS.settings, images=IMAGES))),
        (policy_of(NRI), replace(INPUTS, settings=replace(INPUTS.settings, images=IMAGES), runtime="crio")),
    ],
    ids=["full", "defaults", "nri"],
)
def test_the_api_server_accepts_all_rendered_manifests(
    lab: PlayedCluster, tmp_path_factory: pytest.TempPathFactory, policy: ClusterPolicy, inputs: RenderInputs
) -> None:
    api = ApiLab(lab, tmp_path_factory.mktemp("rendered"))
    rendered = render(policy, inputs)
    assert rendered.faults == ()
    manifests = [encoded(manifest).decode() for manifest in rendered.manifests]
    given = "\n---\n".join((access(NAMESPACE), *manifests))
    reported = api.kubectl("apply", *STRICT, "-f", "-", given=given)
    assert len(reported.splitlines()) == len(objects(NAMESPACE)) + len(manifests)


def test_validation_succeeds_after_the_node_offers_gpus(lab: PlayedCluster, tmp_path: Path) -> None:
    asked = ("--node-name", NODE, "--kubeconfig", str(lab.kubeconfig), "--validations-dir", str(tmp_path))
    refused = ran("validate", "plugin", *asked)
    assert refused.returncode == 1
    assert f"node {NODE} has no allocatable nvidia.com/gpu" in refused.stderr
    api = ApiLab(lab, tmp_path)
    counts = {"nvidia.com/gpu": "2"}
    patch = ("patch", "node", NODE, "--subresource=status", "--type=merge", "-p")
    api.kubectl(*patch, json.dumps({"status": {"capacity": counts, "allocatable": counts}}))
    assert ran("validate", "plugin", *asked).returncode == 0
    assert (tmp_path / "plugin-ready").exists()
