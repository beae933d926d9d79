"""Operands of container nodes: NVIDIA's images with their paths, after gpuvirt's checks."""

import pytest
from msgspec.structs import replace

from gpuvirt.controller.operands.inputs import OperandName, Rendered, RenderInputs
from gpuvirt.controller.operands.rendering import render
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy
from gpuvirt.kube.kinds.podparts import Container
from gpuvirt.kube.kinds.workloads import DaemonSet, RuntimeClass, Service
from tests.controller.operands.policies import ALL_KINDS, INPUTS, full, policy_of

IMAGES = {
    "DRIVER_IMAGE": "r/driver:580",
    "DRIVER_MANAGER_IMAGE": "r/driver-manager:1",
    "CONTAINER_TOOLKIT_IMAGE": "r/toolkit:1",
    "DEVICE_PLUGIN_IMAGE": "r/plugin:1",
    "DCGM_IMAGE": "r/dcgm:1",
    "DCGM_EXPORTER_IMAGE": "r/exporter:1",
    "GFD_IMAGE": "r/gfd:1",
}
NODES = replace(ALL_KINDS, settings=replace(ALL_KINDS.settings, images=IMAGES))
FOR_CONTAINERS = set(OperandName) - {
    OperandName.AGENT,
    OperandName.LABELLER,
    OperandName.MPS,
    OperandName.VGPU_MANAGER,
}


def daemon_set(name: str, policy: ClusterPolicy, inputs: RenderInputs = NODES) -> DaemonSet:
    found = render(policy, inputs)
    (one,) = (
        manifest for manifest in found.manifests if isinstance(manifest, DaemonSet) and manifest.metadata.name == name
    )
    return one


def main_of(found: DaemonSet) -> Container:
    return found.spec.template.spec.containers[0]


def variables(container: Container) -> dict[str, str | None]:
    return {variable.name: variable.value for variable in container.env}


def places(found: DaemonSet) -> dict[str, str]:
    """Return the mount path of each host path in the main container."""
    volumes = {
        volume.name: volume.host_path.path
        for volume in found.spec.template.spec.volumes
        if volume.host_path is not None
    }
    return {mount.mount_path: volumes[mount.name] for mount in main_of(found).volume_mounts if mount.name in volumes}


def operands(found: Rendered) -> set[OperandName]:
    return set(found.operands) & FOR_CONTAINERS


def test_a_container_node_has_all_container_operands_by_default() -> None:
    found = render(policy_of({}), NODES)
    assert found.faults == ()
    assert operands(found) == FOR_CONTAINERS


@pytest.mark.parametrize(
    "inputs",
    [
        INPUTS,
        replace(NODES, settings=replace(NODES.settings, coexists=True)),
        replace(NODES, has_container_nodes=False),
    ],
)
def test_without_nodes_to_serve_no_operand_is_rendered_and_no_fault_reported(inputs: RenderInputs) -> None:
    found = render(policy_of({}), inputs)
    assert (operands(found), found.faults) == (set(), ())


def test_each_missing_image_is_a_fault_of_its_own() -> None:
    found = render(policy_of({"gfd": {"image": "r/gfd:2"}, "dcgm": {"enabled": False}}), ALL_KINDS)
    paths = {fault.because.path for fault in found.faults}
    expected = {"driver", "driver.manager", "toolkit", "devicePlugin", "dcgmExporter"}
    assert paths == {f"$.spec.{name}" for name in expected}
    assert OperandName.VALIDATOR in found.operands
    assert OperandName.GFD in found.operands


def test_the_driver_runs_only_on_nodes_without_the_agent() -> None:
    driver = daemon_set("nvidia-driver-daemonset-rhel9", policy_of({}))
    pod = driver.spec.template.spec
    assert main_of(driver).image == "r/driver:580-rhel9"
    assert pod.affinity is not None
    (term,) = pod.affinity.node_affinity.required.node_selector_terms
    (needed,) = term.match_expressions
    assert (needed.key, needed.operator, needed.values) == ("gpuvirt.io/node", "NotIn", ("true",))
    assert [container.name for container in pod.init_containers] == ["gpus-unused-validation", "k8s-driver-manager"]
    check = pod.init_containers[0]
    assert (check.image, check.args) == (NODES.image, ("validate", "unused", "--wait"))
    assert pod.host_pid, "processes that have a device open are found in /proc"
    assert driver.spec.update_strategy.type == "OnDelete"
    assert daemon_set("nvidia-driver-daemonset-ubuntu22.04", policy_of({})).spec.selector != driver.spec.selector


def test_driver_settings_are_honoured() -> None:
    driver = daemon_set("nvidia-driver-daemonset-ubuntu22.04", full(), ALL_KINDS)
    container = main_of(driver)
    assert variables(container)["KERNEL_MODULE_TYPE"] == "auto"
    assert container.env_from[0].secret_ref.name == "secret-env"
    assert container.resources.limits == {"cpu": "500m"}
    probe = container.startup_probe
    assert probe is not None
    assert (probe.failure_threshold, probe.timeout_seconds) == (120, 60)
    assert "/drivers/nvidia.conf" in {mount.mount_path for mount in container.volume_mounts}
    slower = policy_of({"driver": {"startupProbe": {"failureThreshold": 500}}})
    probe = main_of(daemon_set("nvidia-driver-daemonset-rhel9", slower)).startup_probe
    assert probe is not None
    assert (probe.failure_threshold, probe.period_seconds) == (500, 10)


def test_the_toolkit_waits_for_the_driver_and_finds_the_container_runtime() -> None:
    toolkit = daemon_set("nvidia-container-toolkit-daemonset", policy_of({}))
    (check,) = toolkit.spec.template.spec.init_containers
    assert (check.image, check.args) == (INPUTS.image, ("validate", "driver", "--wait"))
    assert variables(check)["GPUVIRT_DRIVER_STARTED"] == "/run/nvidia/validations/.driver-ctr-ready"
    reported = variables(main_of(toolkit))
    assert reported["RUNTIME"] == "containerd"
    assert reported["CONTAINERD_CONFIG"] == "/runtime/config-dir/config.toml"
    assert reported["RUNTIME_DROP_IN_CONFIG_HOST_PATH"] == "/etc/containerd/conf.d/99-nvidia.toml"
    seen = places(toolkit)
    assert seen["/runtime/config-dir"] == "/etc/containerd"
    assert seen["/runtime/sock-dir"] == "/run/containerd"
    without = policy_of({"driver": {"enabled": False}})
    (check,) = daemon_set("nvidia-container-toolkit-daemonset", without).spec.template.spec.init_containers
    assert variables(check)["GPUVIRT_DRIVER_STARTED"] == "", "a driver of the host writes no such file"


def test_a_container_runtime_in_another_path_is_found_by_the_policys_variables() -> None:
    env = [
        {"name": "CONTAINERD_CONFIG", "value": "/var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl"},
        {"name": "CONTAINERD_SOCKET", "value": "/run/k3s/containerd/containerd.sock"},
    ]
    toolkit = daemon_set("nvidia-container-toolkit-daemonset", policy_of({"toolkit": {"env": env}}))
    reported, seen = variables(main_of(toolkit)), places(toolkit)
    assert reported["RUNTIME_CONFIG"] == "/runtime/config-dir/config.toml.tmpl"
    assert reported["CONTAINERD_SOCKET"] == "/runtime/sock-dir/containerd.sock"
    assert seen["/runtime/config-dir"] == "/var/lib/rancher/k3s/agent/etc/containerd"
    assert seen["/runtime/sock-dir"] == "/run/k3s/containerd"
    source = [{"name": "RUNTIME_CONFIG_SOURCE", "value": "command,file=/etc/a.toml"}]
    toolkit = daemon_set("nvidia-container-toolkit-daemonset", policy_of({"toolkit": {"env": source}}))
    assert variables(main_of(toolkit))["RUNTIME_CONFIG_SOURCE"] == "command,file=/host/etc/a.toml"


def test_cri_o_is_configured_by_drop_in_files_and_docker_is_a_fault() -> None:
    toolkit = daemon_set("nvidia-container-toolkit-daemonset", policy_of({}), replace(NODES, runtime="crio"))
    assert places(toolkit)["/runtime/config-dir.d"] == "/etc/crio/crio.conf.d"
    found = render(policy_of({}), replace(NODES, runtime="docker"))
    (fault,) = found.faults
    assert (fault.operand, fault.because.path) == (OperandName.TOOLKIT, "$.spec.toolkit.enabled")


def test_pods_get_gpus_by_the_runtime_class_or_the_nri_annotation() -> None:
    plugin = daemon_set("nvidia-device-plugin-daemonset", policy_of({"operator": {"runtimeClass": "gpus"}}))
    assert plugin.spec.template.spec.runtime_class_name == "gpus"
    found = render(policy_of({}), NODES)
    names = [manifest.metadata.name for manifest in found.manifests if isinstance(manifest, RuntimeClass)]
    assert names == ["nvidia", "nvidia-cdi", "nvidia-legacy"]
    nri = policy_of({"cdi": {"nriPluginEnabled": True}})
    plugin = daemon_set("nvidia-device-plugin-daemonset", nri)
    assert plugin.spec.template.spec.runtime_class_name == ""
    annotations = plugin.spec.template.metadata.annotations
    assert annotations["nvidia.cdi.k8s.io/container.nvidia-device-plugin"] == "management.nvidia.com/gpu=all"
    assert OperandName.RUNTIME_CLASSES not in render(nri, NODES).operands


def test_the_device_plugin_reads_the_driver_path_from_the_validator() -> None:
    paths = {"kubeletRootDir": "/data/kubelet", "driverInstallDir": "/opt/driver"}
    plugin = daemon_set(
        "nvidia-device-plugin-daemonset", policy_of({"hostPaths": paths, "toolkit": {"installDir": "/opt"}})
    )
    (waits,) = plugin.spec.template.spec.init_containers
    assert waits.args == ("validate", "await", "toolkit-ready")
    assert "/run/nvidia/validations/driver-ready" in main_of(plugin).command[2]
    reported, seen = variables(main_of(plugin)), places(plugin)
    assert reported["NVIDIA_CDI_HOOK_PATH"] == "/opt/toolkit/nvidia-cdi-hook"
    assert seen["/var/lib/kubelet/device-plugins"] == "/data/kubelet/device-plugins"
    assert seen["/driver-root"] == "/opt/driver"
    without = variables(main_of(daemon_set("nvidia-device-plugin-daemonset", policy_of({"cdi": {"enabled": False}}))))
    assert without["DEVICE_LIST_STRATEGY"] == "envvar"


def test_the_dcgm_exporter_connects_to_the_host_engine_of_its_node_if_enabled() -> None:
    exporter = main_of(daemon_set("nvidia-dcgm-exporter", policy_of({})))
    assert variables(exporter)["DCGM_REMOTE_HOSTENGINE_INFO"] == "nvidia-dcgm:5555"
    embedded = main_of(daemon_set("nvidia-dcgm-exporter", policy_of({"dcgm": {"enabled": False}})))
    assert "DCGM_REMOTE_HOSTENGINE_INFO" not in variables(embedded)
    services = [manifest for manifest in render(policy_of({}), NODES).manifests if isinstance(manifest, Service)]
    assert {service.metadata.name: service.spec.internal_traffic_policy for service in services} == {
        "nvidia-dcgm": "Local",
        "nvidia-dcgm-exporter": "",
    }


def test_dcgm_exporter_settings_are_honoured() -> None:
    exporter = daemon_set("nvidia-dcgm-exporter", full(), ALL_KINDS)
    template = exporter.spec.template
    assert (template.metadata.labels["c"], template.metadata.annotations["a"]) == ("d", "b")
    assert variables(main_of(exporter))["DCGM_EXPORTER_COLLECTORS"] == "/etc/dcgm-exporter/dcgm-metrics.csv"


def test_the_validator_checks_components_in_dependency_order() -> None:
    validator = daemon_set("nvidia-operator-validator", full(), ALL_KINDS)
    pod = validator.spec.template.spec
    checks = [(container.name, container.args) for container in pod.init_containers]
    assert checks == [(f"{what}-validation", ("validate", what, "--wait")) for what in ("driver", "toolkit", "plugin")]
    assert variables(pod.init_containers[1])["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert main_of(validator).args == ("validate", "rest")
    assert variables(pod.init_containers[2])["WITH_WORKLOAD"] == "false"


def test_update_strategies_follow_the_policy_and_drivers_update_on_delete() -> None:
    policy = policy_of({"daemonsets": {"rollingUpdate": {"maxUnavailable": "25%"}}})
    strategy = daemon_set("nvidia-device-plugin-daemonset", policy).spec.update_strategy
    assert strategy.rolling_update is not None
    assert strategy.rolling_update.max_unavailable == "25%"
    strategy = daemon_set("nvidia-device-plugin-daemonset", policy_of({})).spec.update_strategy
    assert strategy.rolling_update is not None
    assert strategy.rolling_update.max_unavailable == 1
    waits = policy_of({"daemonsets": {"updateStrategy": "OnDelete"}})
    assert daemon_set("nvidia-device-plugin-daemonset", waits).spec.update_strategy.type == "OnDelete"
