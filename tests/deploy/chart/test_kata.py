"""The chart's RuntimeClass of Kata, and its policy with `sandboxWorkloads.mode: kata`."""

import pytest

from tests.deploy.chart.helmchart import Helm, at

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

VMS = ("sandboxWorkloads.enabled=true", "sandboxWorkloads.mode=kata", "sandboxWorkloads.defaultWorkload=on-demand")
ON = (*VMS, "kata.enabled=true")
IN_CLASS = "kata.runtimeClass"


def test_the_policy_has_mode_kata(helm: Helm) -> None:
    found = at(helm.template(*VMS).policy, "spec", "sandboxWorkloads")
    assert found == {"enabled": True, "mode": "kata", "defaultWorkload": "on-demand"}
    switch = helm.template(*VMS, "kataSandboxDevicePlugin.enabled=false").policy
    assert at(switch, "spec", "kataSandboxDevicePlugin") == {"enabled": False}


def test_there_is_no_runtime_class_by_default(helm: Helm) -> None:
    assert not helm.template(*VMS).named("RuntimeClass")


def test_the_runtime_class_keeps_pods_on_nodes_with_agent_and_kata(helm: Helm) -> None:
    found = helm.template(*ON).one("RuntimeClass", "kata-gpu")
    assert found["apiVersion"] == "node.k8s.io/v1"
    assert found["handler"] == "kata-qemu-nvidia-gpu"
    nodes = {"gpuvirt.io/node": "true", "katacontainers.io/kata-runtime": "true"}
    assert found["scheduling"] == {"nodeSelector": nodes}
    assert at(found, "overhead", "podFixed") == {"memory": "10240Mi", "cpu": "1"}
    assert at(found, "metadata", "labels", "app.kubernetes.io/name") == "gpuvirt"


def test_the_runtime_class_follows_the_values(helm: Helm) -> None:
    values = (
        f"{IN_CLASS}.name=mine",
        f"{IN_CLASS}.handler=kata-qemu",
        f"{IN_CLASS}.nodeSelector.katacontainers\\.io/kata-runtime=null",
        f"{IN_CLASS}.tolerations[0].key=nvidia.com/gpu",
        f"{IN_CLASS}.tolerations[0].operator=Exists",
        f"{IN_CLASS}.overhead=null",
    )
    found = helm.template(*ON, *values).one("RuntimeClass", "mine")
    assert found["handler"] == "kata-qemu"
    assert at(found, "scheduling", "nodeSelector") == {"gpuvirt.io/node": "true"}
    assert at(found, "scheduling", "tolerations") == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert "overhead" not in found


def test_a_handler_that_no_runtime_can_have_is_refused(helm: Helm) -> None:
    assert "'/kata/runtimeClass/handler': 'Kata'" in helm.refusal(*ON, f"{IN_CLASS}.handler=Kata")
