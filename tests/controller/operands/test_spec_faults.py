"""Invalid policies that NVIDIA's CustomResourceDefinition accepts."""

import pytest

from gpuvirt.controller.operands.inputs import spec_faults
from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.workloads import DaemonSet
from gpuvirt.plain import Plain
from tests.controller.operands.policies import ALL_KINDS, full, policy_of


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"cdi": {"nriPluginEnabled": True, "enabled": False}}, "$.spec.cdi.nriPluginEnabled"),
        ({"cdi": {"nriPluginEnabled": True}, "toolkit": {"enabled": False}}, "$.spec.cdi.nriPluginEnabled"),
        ({"hostPaths": {"kubeletRootDir": "var/lib/kubelet"}}, "$.spec.hostPaths.kubeletRootDir"),
        ({"hostPaths": {"rootFS": "/a/../b"}}, "$.spec.hostPaths.rootFS"),
        (
            {"daemonsets": {"rollingUpdate": {"maxUnavailable": "some"}}},
            "$.spec.daemonsets.rollingUpdate.maxUnavailable",
        ),
    ],
)
def test_an_invalid_spec_value_is_reported_with_its_path(spec: Plain, path: str) -> None:
    assert [fault.path for fault in spec_faults(policy_of(spec).spec)] == [path]


def test_a_valid_spec_has_no_faults() -> None:
    assert list(spec_faults(full().spec)) == []
    assert list(spec_faults(policy_of({"cdi": {"nriPluginEnabled": True}}).spec)) == []


@pytest.mark.parametrize("text", ["some", "0", "150%", "-1", "\u0661"])
def test_an_invalid_max_unavailable_falls_back_to_a_single_pod(text: str) -> None:
    policy = policy_of({"daemonsets": {"rollingUpdate": {"maxUnavailable": text}}})
    found = {
        manifest.metadata.name: manifest
        for manifest in render(policy, ALL_KINDS).manifests
        if isinstance(manifest, DaemonSet)
    }
    rolling = found["nvidia-operator-validator"].spec.update_strategy.rolling_update
    assert rolling is not None
    assert rolling.max_unavailable == 1
