"""`gpuvirt install check` shows what each node would get, as the controller would decide."""

import asyncio
import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpuvirt.controller.install.images import operands_of
from gpuvirt.controller.install.installing import NodePreview, previews
from gpuvirt.errors import ConfigError
from gpuvirt.kube.kinds.core import ReadNode, ReadNodeStatus
from gpuvirt.kube.labels import GPU_FEATURES
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.desired.workload import LABEL
from tests.cli.commandline import GPUVIRT, PATH
from tests.deploy.chart.helmchart import CHART, NAMESPACE, Helm
from tests.extender.podapi import serving
from tests.kube.scriptedapi import Call, Reply

PART = {"repository": "r", "image": "i", "version": "1"}
CONTAINERS = dict.fromkeys(("toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd"), PART)
ALL_PARTS = {**CONTAINERS, "driver": {**PART, "manager": PART}}
LINUX = {"kubernetes.io/os": "linux"}
HAS_GPUS = {GPU_FEATURES[0]: "true", **LINUX}
SIX = {"driver", "container-toolkit", "device-plugin", "dcgm", "dcgm-exporter", "gpu-feature-discovery"}


def manifest(**spec: object) -> str:
    names = {"apiVersion": "nvidia.com/v1", "kind": "ClusterPolicy", "metadata": {"name": "cluster-policy"}}
    return json.dumps({**names, "spec": {"sandboxWorkloads": {"enabled": True}, **ALL_PARTS, **spec}})


def previewed(labels: dict[str, str], resources: dict[str, str] | None = None, **spec: object) -> NodePreview:
    policy, inputs = operands_of([("policy.yaml", manifest(**spec))], "gpuvirt:1")
    node = ReadNode(Metadata(name="node01", labels=labels), ReadNodeStatus(allocatable=resources or {}))
    (found,) = previews([node], policy, inputs)
    return found


def test_an_unlabelled_node_gets_nvidias_six_parts() -> None:
    found = previewed(HAS_GPUS)
    assert (found.has_gpus, found.workload, found.note) == (True, "container", "")
    assert set(found.components) == {*SIX, "operator-validator"}
    assert "defaultWorkload" in found.origin


def test_a_node_without_labels_gets_the_same_if_it_has_gpus() -> None:
    found = previewed(LINUX)
    assert not found.has_gpus
    assert set(found.components) == {*SIX, "operator-validator"}


def test_a_part_that_the_policy_or_a_label_disables_is_not_deployed() -> None:
    assert "driver" not in previewed(HAS_GPUS, driver={"enabled": False}).components
    found = previewed({**HAS_GPUS, "nvidia.com/gpu.deploy.driver": "pre-installed"})
    assert set(found.components) == {*SIX, "operator-validator"} - {"driver"}
    assert found.note == "label nvidia.com/gpu.deploy.driver=pre-installed"
    off = previewed({**HAS_GPUS, "nvidia.com/gpu.deploy.operands": "false"})
    assert (off.components, off.note) == ((), "label nvidia.com/gpu.deploy.operands=false")


def test_a_node_of_another_plugin_gets_nothing() -> None:
    found = previewed(HAS_GPUS, {"nvidia.com/gpu": "2"})
    assert found.components == ()
    assert "did not deploy offers nvidia.com/gpu" in found.note


def test_a_node_for_vms_gets_the_agent() -> None:
    enabled = {"enabled": True}
    found = previewed({**HAS_GPUS, LABEL: "vm-passthrough"}, vfioManager=enabled, sandboxDevicePlugin=enabled)
    assert found.components == ("gpuvirt-node",)
    invalid = previewed({**HAS_GPUS, LABEL: "kata"})
    assert (invalid.workload, invalid.components) == ("invalid", ())
    assert "kata" in invalid.note


@pytest.mark.parametrize("workload", ["vm-passthrough", "kata"])
def test_a_workload_label_that_the_policy_ignores_is_named(workload: str) -> None:
    labelled = {**HAS_GPUS, LABEL: workload}
    found = previewed(labelled, sandboxWorkloads={"enabled": False})
    ignored = f"label {LABEL}={workload} is ignored: sandboxWorkloads.enabled is not true"
    assert (found.workload, found.note) == ("container", ignored)
    served = previewed(labelled, {"nvidia.com/gpu": "2"}, sandboxWorkloads={"enabled": False})
    assert served.note.startswith(f"{ignored}; a device plugin")
    same = previewed({**HAS_GPUS, LABEL: "container"}, sandboxWorkloads={"enabled": False})
    assert same.note == ""


@pytest.mark.parametrize("texts", [[], [("a", manifest()), ("b", manifest())]])
def test_one_policy_is_expected(texts: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match=f"found {len(texts)} ClusterPolicies"):
        operands_of(texts, "gpuvirt:1")


async def checked(folder: Path, *arguments: str, leases: Reply) -> CompletedProcess[str]:
    node = {"metadata": {"name": "node01", "labels": HAS_GPUS}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}

    def answer(call: Call) -> Reply:
        nodes = (200, {"metadata": {"resourceVersion": "1"}, "items": [node]})
        return nodes if call.path == "/api/v1/nodes" else leases

    file = folder / "policy.yaml"
    file.write_text(manifest())
    async with serving(answer, folder) as served:
        command = (*GPUVIRT, "install", "check", str(file), "--kubeconfig", str(served.kubeconfig), *arguments)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=pipe, env={"PATH": PATH, "COLUMNS": "100"}
        )
        out, err = await process.communicate()
    return CompletedProcess(command, process.returncode or 0, out.decode(), err.decode())


async def test_the_command_needs_only_the_rights_of_its_user(tmp_path: Path) -> None:
    done = await checked(tmp_path, leases=(403, {"reason": "Forbidden", "message": "no"}))
    assert done.returncode == 0, done.stderr
    assert "node01" in done.stdout
    assert "LeftAlone" not in done.stdout
    assert "unknown: whether NVIDIA's operator runs" in done.stdout


async def test_the_command_names_nvidias_operator(tmp_path: Path) -> None:
    lease = {"metadata": {"name": "53822513.nvidia.com", "namespace": "gpu"}, "spec": {"holderIdentity": "pod-1"}}
    leases = (200, {"metadata": {"resourceVersion": "1"}, "items": [lease]})
    found = json.loads((await checked(tmp_path, "-o", "json", leases=leases)).stdout)
    assert found["nodes"][0]["components"] == []
    assert "lease gpu/53822513.nvidia.com is held by pod-1" in found["notes"][0]


@pytest.mark.ring("helm")
def test_the_output_of_helm_has_the_policy(helm: Helm) -> None:
    done = helm.run("template", "gpuvirt", str(CHART), "-n", NAMESPACE, "--set", "image.repository=r/gpuvirt")
    policy, inputs = operands_of([("stdin", done.stdout)], "")
    (found,) = previews([ReadNode(Metadata(name="node01", labels=HAS_GPUS))], policy, inputs)
    assert set(found.components) == {*SIX, "operator-validator"}
