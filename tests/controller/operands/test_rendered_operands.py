"""Operands that a policy renders: the agent, the vGPU manager, and common settings of all DaemonSets."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from gpuvirt import documents
from gpuvirt.controller.operands.assembly import template_of
from gpuvirt.controller.operands.images import os_tag
from gpuvirt.controller.operands.inputs import OperandName, Rendered, RenderInputs
from gpuvirt.controller.operands.rendering import config_maps_of, render
from gpuvirt.controller.settings import SharedResource
from gpuvirt.facts.ids import ResourceName
from gpuvirt.facts.pci import FunctionKind
from gpuvirt.kube.kinds.podparts import Container
from gpuvirt.kube.kinds.workloads import ConfigMap, DaemonSet, Manifest, Role, encoded, resource_of
from gpuvirt.model.desired.settings import (
    Enforcement,
    HamiCore,
    IdleCount,
    OnDemandNames,
    OnDemandSettings,
    Settings,
    ShareSettings,
    VfioNodes,
)
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.model.shares.demand import Units
from gpuvirt.plain import Plain
from tests.controller.operands.policies import ALL_KINDS, INPUTS, full, policy_of, sandbox, specs


def daemon_sets(found: Rendered) -> dict[str, DaemonSet]:
    return {manifest.metadata.name: manifest for manifest in found.manifests if isinstance(manifest, DaemonSet)}


def agent_of(found: Rendered) -> DaemonSet:
    return daemon_sets(found)["gpuvirt-node"]


def main_of(found: DaemonSet) -> Container:
    return found.spec.template.spec.containers[0]


def value_of(container: Container, name: str) -> str | None:
    (found,) = (variable.value for variable in container.env if variable.name == name)
    return found


VGPU = {"enabled": True, "repository": "registry.example", "image": "vgpu-manager", "version": "570.1"}


# --- the MPS daemon


def test_the_mps_daemon_runs_on_labelled_nodes_and_waits_for_its_clients() -> None:
    policy = sandbox(sandboxDevicePlugin={"shares": {"mps": {"enabled": True}}})
    daemon = daemon_sets(render(policy, INPUTS))["gpuvirt-mps"]
    pod = daemon.spec.template.spec
    selector = {"gpuvirt.io/node": "true", "kubernetes.io/os": "linux"}
    assert pod.node_selector == {**selector, "nvidia.com/gpu.deploy.client": "true"}
    older = render(policy, replace(INPUTS, selects_clients=False))
    assert daemon_sets(older)["gpuvirt-mps"].spec.template.spec.node_selector == selector, "nodes lack the label"
    assert pod.affinity is not None
    (term,) = pod.affinity.node_affinity.required.node_selector_terms
    (label,) = term.match_expressions
    assert (label.key, label.operator) == ("gpuvirt.io/shares.enforcement", "In")
    assert label.values == ("mps", "hami-core-mps", "driver-mps")
    assert daemon.spec.update_strategy.type == "OnDelete"
    assert not daemon.metadata.owner_references, "it does not end with the policy"
    container = main_of(daemon)
    assert container.args == ("mps", "run")
    assert container.lifecycle is None, "SIGTERM follows a hook that fails; the program waits by itself"
    assert (container.liveness_probe, container.resources.limits) == (None, {}), "nothing ends it beside its clients"
    assert pod.termination_grace_period_seconds == 365 * 24 * 3600
    assert pod.host_pid
    assert pod.automount_service_account_token is False, "it asks the API server nothing"


@pytest.mark.parametrize(
    "plugin",
    [
        {},
        {"shares": {}},
        {"shares": {"enforcement": "mps"}},
        {"shares": {"mps": {"enabled": False}}},
        {"enabled": False, "shares": {"mps": {"enabled": True}}},
    ],
)
def test_no_mps_daemon_runs_unless_the_policy_asks_for_it(plugin: Plain) -> None:
    assert OperandName.MPS not in render(sandbox(sandboxDevicePlugin=plugin), INPUTS).operands


# --- the agent


def test_the_agent_runs_on_labelled_nodes_and_updates_on_delete() -> None:
    agent = agent_of(render(sandbox(), INPUTS))
    pod = agent.spec.template.spec
    assert pod.node_selector["gpuvirt.io/node"] == "true"
    assert agent.spec.update_strategy.type == "OnDelete"
    assert main_of(agent).image == "registry.example/gpuvirt:1"
    labels = agent.spec.template.metadata.labels
    assert labels["app"] == "gpuvirt-node"
    assert labels["app.kubernetes.io/part-of"] == "gpu-operator"
    assert agent.metadata.owner_references[0].uid == "0000-1111"
    assert value_of(main_of(agent), "GPUVIRT_VALIDATIONS_DIR") == "/run/nvidia/validations"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"sandboxWorkloads": {"enabled": False}},
        {"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": {"enabled": False}},
        {"sandboxWorkloads": {"enabled": False, "mode": "kata"}},
        {"sandboxWorkloads": {"enabled": True, "mode": "kata"}, "kataSandboxDevicePlugin": {"enabled": False}},
    ],
)
def test_without_vms_no_agent_is_rendered(spec: Plain) -> None:
    assert OperandName.AGENT not in render(policy_of(spec), INPUTS).operands


@pytest.mark.parametrize("parts", [{}, {"sandboxDevicePlugin": {"enabled": False}, "kataManager": {"enabled": True}}])
def test_kata_gets_the_operands_that_kubevirt_gets_with_one_node_of_a_device(parts: dict[str, object]) -> None:
    manager = {"vgpuManager": {"enabled": True, "repository": "r", "image": "vgpu-manager", "version": "1"}}
    kata = sandbox(**manager, **parts, sandboxWorkloads={"enabled": True, "mode": "kata"})
    assert {OperandName.AGENT, OperandName.VGPU_MANAGER} <= render(kata, INPUTS).operands
    one_node = sandbox(**manager, sandboxDevicePlugin={"vfioNodes": "iommufd"})
    for_kubevirt = [encoded(manifest) for manifest in render(one_node, INPUTS).manifests]
    assert [encoded(manifest) for manifest in render(kata, INPUTS).manifests] == for_kubevirt


def test_agent_settings_follow_the_policy_and_the_agent_accepts_them() -> None:
    config = {"config": {"name": "custom-vgpu-config", "default": "A10-4Q"}}
    found = render(sandbox(vgpuDeviceManager=config), INPUTS)
    (written,) = (
        manifest
        for manifest in found.manifests
        if isinstance(manifest, ConfigMap) and manifest.metadata.name == "gpuvirt-node"
    )
    read = documents.parse(written.data["node.yaml"], Settings, where="node.yaml")
    assert (read.vgpu_config_map, read.vgpu_config) == ("custom-vgpu-config", "A10-4Q")
    (role,) = (manifest for manifest in found.manifests if isinstance(manifest, Role))
    assert role.rules[0].resource_names == ("custom-vgpu-config",)
    plain = render(sandbox(), INPUTS)
    assert template_of(agent_of(found)) != template_of(agent_of(plain)), "the agent reads its settings at its start"


@pytest.mark.parametrize(
    ("setting", "expected"), [({}, True), ({"requireReset": True}, True), ({"requireReset": False}, False)]
)
def test_the_policy_sets_whether_a_gpu_must_be_reset_between_pods(setting: Plain, expected: bool) -> None:
    found = render(policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": setting}), INPUTS)
    (written,) = (
        manifest
        for manifest in found.manifests
        if isinstance(manifest, ConfigMap) and manifest.metadata.name == "gpuvirt-node"
    )
    assert documents.parse(written.data["node.yaml"], Settings, where="node.yaml").require_reset is expected


def test_the_policy_permits_grace_gpus_without_their_driver() -> None:
    setting: Plain = {"graceWithoutDriver": True}
    found = render(policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": setting}), INPUTS)
    (written,) = (
        manifest
        for manifest in found.manifests
        if isinstance(manifest, ConfigMap) and manifest.metadata.name == "gpuvirt-node"
    )
    assert documents.parse(written.data["node.yaml"], Settings, where="node.yaml").grace_without_driver


def agents_settings(sandbox_workloads: Plain, **parts: Plain) -> Settings:
    found = render(policy_of({"sandboxWorkloads": sandbox_workloads, **parts}), INPUTS)
    assert found.faults == ()
    written = (manifest for manifest in found.manifests if isinstance(manifest, ConfigMap))
    text = next(manifest for manifest in written if manifest.metadata.name == "gpuvirt-node").data["node.yaml"]
    return documents.parse(text, Settings, where="node.yaml")


KATA: Plain = {"enabled": True, "mode": "kata"}


@pytest.mark.parametrize("part", ["sandboxDevicePlugin", "kataSandboxDevicePlugin"])
def test_the_aliases_of_nvidias_plugin_for_kata_name_the_agents_resources(part: str) -> None:
    """Case clusterpolicy-kata-env.yaml; NVIDIA's documentation names the one part, and former versions the other."""
    env: Plain = [{"name": "P_GPU_ALIAS", "value": "pgpu"}, {"name": "NVSWITCH_ALIAS", "value": "nvswitch"}]
    found = agents_settings(KATA, **{part: {"env": env}})
    assert found.kind_aliases == {FunctionKind.GPU: "pgpu", FunctionKind.NVSWITCH: "nvswitch"}
    assert found.offer == (FunctionKind.GPU, FunctionKind.NVSWITCH)
    empty: Plain = [{"name": "P_GPU_ALIAS", "value": ""}]
    assert agents_settings(KATA, **{part: {"env": empty}}) == agents_settings(KATA)
    assert agents_settings({"enabled": True}, **{part: {"env": env}}) == agents_settings({"enabled": True})


def test_the_alias_of_the_plugin_for_kata_takes_precedence() -> None:
    old: Plain = {"env": [{"name": "P_GPU_ALIAS", "value": "a"}]}
    new: Plain = {"env": [{"name": "P_GPU_ALIAS", "value": ""}]}
    assert agents_settings(KATA, sandboxDevicePlugin=old, kataSandboxDevicePlugin=new) == agents_settings(KATA)


@pytest.mark.parametrize("part", ["sandboxDevicePlugin", "kataSandboxDevicePlugin"])
def test_an_alias_that_is_no_name_is_a_fault(part: str) -> None:
    env: Plain = [{"name": "P_GPU_ALIAS", "value": "p gpu"}]
    (fault,) = render(policy_of({"sandboxWorkloads": KATA, part: {"env": env}}), INPUTS).faults
    assert fault.because.path == f"$.spec.{part}.env[P_GPU_ALIAS]"


@pytest.mark.parametrize(
    ("mode", "chosen", "expected"),
    [
        ("kubevirt", None, VfioNodes.BOTH),
        ("kubevirt", "group", VfioNodes.GROUP),
        ("kata", None, VfioNodes.IOMMUFD),
        ("kata", "group", VfioNodes.GROUP),
        ("kata", "both", VfioNodes.BOTH),
    ],
)
def test_kata_gets_one_node_of_a_device_unless_the_policy_chooses(
    mode: str, chosen: str | None, expected: VfioNodes
) -> None:
    found = agents_settings({"enabled": True, "mode": mode}, sandboxDevicePlugin={"vfioNodes": chosen})
    assert found.vfio_nodes is expected


def test_the_policy_names_resources_without_gpus() -> None:
    setting: Plain = {"resourcesWithoutGpus": ["example.com/nic"]}
    found = render(policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": setting}), INPUTS)
    (written,) = (
        manifest
        for manifest in found.manifests
        if isinstance(manifest, ConfigMap) and manifest.metadata.name == "gpuvirt-node"
    )
    read = documents.parse(written.data["node.yaml"], Settings, where="node.yaml")
    assert read.resources_without_gpus == ("example.com/nic",)


def test_the_policy_sets_how_vgpus_on_demand_are_offered() -> None:
    def on_demand(part: Plain) -> OnDemandSettings:
        policy = policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": {"onDemand": part}})
        found = (manifest for manifest in render(policy, INPUTS).manifests if isinstance(manifest, ConfigMap))
        text = next(manifest for manifest in found if manifest.metadata.name == "gpuvirt-node").data["node.yaml"]
        return documents.parse(text, Settings, where="node.yaml").on_demand

    part: Plain = {"names": "type", "prefix": "a.example/b-", "types": ["A10-4Q"], "idleCount": "max", "sizes": "mixed"}
    assert on_demand(part) == OnDemandSettings(
        names=OnDemandNames.TYPE,
        prefix="a.example/b-",
        types=("A10-4Q",),
        idle_count=IdleCount.MAX,
        sizes=Sizes.MIXED,
    )
    assert on_demand({}) == OnDemandSettings()


@pytest.mark.parametrize(("field", "value"), [("prefix", "no domain"), ("types", ["A10"])])
def test_invalid_settings_of_vgpus_on_demand_keep_the_deployed_agent(field: str, value: Plain) -> None:
    plugin: Plain = {"onDemand": {field: value}}
    found = render(policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": plugin}), INPUTS)
    (fault,) = found.faults
    assert fault.because.path.startswith(f"$.spec.sandboxDevicePlugin.onDemand.{field}")
    assert OperandName.AGENT in found.operands


def test_the_policy_sets_what_limits_shares() -> None:
    def shares(part: Plain) -> ShareSettings:
        policy = policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": {"shares": part}})
        found = (manifest for manifest in render(policy, INPUTS).manifests if isinstance(manifest, ConfigMap))
        text = next(manifest for manifest in found if manifest.metadata.name == "gpuvirt-node").data["node.yaml"]
        assert ("shares" in text) == (documents.parse(text, Settings, where="node.yaml").shares != ShareSettings())
        return documents.parse(text, Settings, where="node.yaml").shares

    part: Plain = {
        "enforcement": "hami-core",
        "hamiCore": {"library": "/opt/libvgpu.so"},
        "gpuMemoryMib": {"NVIDIA GeForce RTX 3090": 24_000},
    }
    assert shares(part) == ShareSettings(
        enforcement=Enforcement.HAMI_CORE,
        hami_core=HamiCore(library="/opt/libvgpu.so"),
        gpu_memory_mib={"NVIDIA GeForce RTX 3090": 24_000},
    )
    assert shares({}) == ShareSettings()
    assert shares({"enforcement": "none", "hamiCore": {"library": HamiCore().library}}) == ShareSettings()


@pytest.mark.parametrize(
    ("part", "path"),
    [({"hamiCore": {"library": "l.so"}}, ".hamiCore.library"), ({"gpuMemoryMib": {"NVIDIA X": 0}}, "")],
)
def test_invalid_limits_of_shares_keep_the_deployed_agent(part: Plain, path: str) -> None:
    policy = policy_of({"sandboxWorkloads": {"enabled": True}, "sandboxDevicePlugin": {"shares": part}})
    found = render(policy, INPUTS)
    (fault,) = found.faults
    assert fault.because.path == f"$.spec.sandboxDevicePlugin.shares{path}"
    assert OperandName.AGENT in found.operands


def test_agents_offer_shared_gpus_as_the_resource_that_the_extender_places() -> None:
    def shares(inputs: RenderInputs) -> ShareSettings:
        found = (manifest for manifest in render(sandbox(), inputs).manifests if isinstance(manifest, ConfigMap))
        text = next(manifest for manifest in found if manifest.metadata.name == "gpuvirt-node").data["node.yaml"]
        return documents.parse(text, Settings, where="node.yaml").shares

    shared = SharedResource(ResourceName("nvidia.com/share"), Units(100))
    assert shares(replace(INPUTS, settings=replace(INPUTS.settings, shared=shared))) == ShareSettings(
        resource="nvidia.com/share", units=100
    )
    assert shares(INPUTS) == ShareSettings()


def test_an_invalid_config_map_name_keeps_the_deployed_agent() -> None:
    found = render(sandbox(vgpuDeviceManager={"config": {"name": "No Such"}}), INPUTS)
    (fault,) = found.faults
    assert fault.because.path == "$.spec.vgpuDeviceManager.config.name"
    assert OperandName.AGENT in found.operands
    assert "gpuvirt-node" not in daemon_sets(found)


def test_paths_of_the_host_are_honoured() -> None:
    paths = {"rootFS": "/host-root", "driverInstallDir": "/opt/driver", "kubeletRootDir": "/data/kubelet/"}
    agent = agent_of(render(sandbox(hostPaths=paths), INPUTS))
    volumes = {
        volume.name: volume.host_path.path
        for volume in agent.spec.template.spec.volumes
        if volume.host_path is not None
    }
    assert volumes["host-root"] == "/host-root"
    assert volumes["driver-install-dir"] == "/opt/driver"
    assert volumes["device-plugins"] == "/data/kubelet/device-plugins"
    mounts = {mount.name: mount.mount_path for mount in main_of(agent).volume_mounts}
    assert mounts["device-plugins"] == "/data/kubelet/device-plugins"
    assert mounts["driver-install-dir"] == "/run/nvidia/driver"
    assert value_of(main_of(agent), "GPUVIRT_KUBELET_DIR") == "/data/kubelet"


# --- the vGPU manager


def test_each_operating_system_has_its_own_vgpu_manager() -> None:
    inputs = replace(INPUTS, vgpu_os=frozenset({"ubuntu22.04", "rhel9"}))
    found = daemon_sets(render(sandbox(vgpuManager=VGPU), inputs))
    ours = {name: manifest for name, manifest in found.items() if name.startswith("nvidia-vgpu-manager-daemonset-")}
    assert {main_of(resource).image for resource in ours.values()} == {
        "registry.example/vgpu-manager:570.1-ubuntu22.04",
        "registry.example/vgpu-manager:570.1-rhel9",
    }
    one = ours["nvidia-vgpu-manager-daemonset-rhel9"]
    selector = one.spec.template.spec.node_selector
    assert selector == {"nvidia.com/gpu.deploy.vgpu-manager": "true", "gpuvirt.io/os": "rhel9"}
    assert one.spec.selector.match_labels == {"app": "nvidia-vgpu-manager-daemonset", "gpuvirt.io/os": "rhel9"}
    alone = daemon_sets(render(sandbox(vgpuManager=VGPU), replace(INPUTS, vgpu_os=frozenset({"rhel9"}))))
    assert alone["nvidia-vgpu-manager-daemonset-rhel9"] == one, "another operating system changes nothing"


def test_no_operand_that_unbinds_gpus_runs_beside_vms() -> None:
    everything = {**VGPU, "driverManager": {"repository": "r", "image": "k8s-driver-manager", "version": "v1"}}
    strategy = {"updateStrategy": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}}
    found = daemon_sets(render(sandbox(vgpuManager=everything, daemonsets=strategy), INPUTS))
    for name in ("gpuvirt-node", "nvidia-vgpu-manager-daemonset-ubuntu22.04"):
        assert found[name].spec.update_strategy.type == "OnDelete"
        assert found[name].spec.template.spec.init_containers == ()
    manager = found["nvidia-vgpu-manager-daemonset-ubuntu22.04"]
    assert manager.metadata.owner_references == (), "its pods would be deleted with the policy"


@pytest.mark.parametrize(
    ("image", "found"),
    [
        ({"repository": "r/x", "image": "m", "version": "1"}, "r/x/m:1-ubuntu22.04"),
        ({"repository": "r", "image": "m", "version": "sha256:00"}, "r/m@sha256:00"),
        ({"image": "r/m@sha256:00"}, "r/m@sha256:00"),
        ({"image": "r/m:1"}, "r/m:1-ubuntu22.04"),
        ({}, "env/m:2-ubuntu22.04"),
    ],
)
def test_an_image_comes_from_the_policy_or_from_the_controller(image: Plain, found: str) -> None:
    assert isinstance(image, dict)
    inputs = replace(INPUTS, settings=replace(INPUTS.settings, images={"VGPU_MANAGER_IMAGE": "env/m:2"}))
    rendered = daemon_sets(render(sandbox(vgpuManager={"enabled": True, **image}), inputs))
    assert main_of(rendered["nvidia-vgpu-manager-daemonset-ubuntu22.04"]).image == found


@pytest.mark.parametrize(
    ("image", "path", "reported"),
    [
        ({}, "$.spec.vgpuManager", "VGPU_MANAGER_IMAGE"),
        ({"version": "1"}, "$.spec.vgpuManager.repository", "beside version 1"),
        ({"image": "vgpu-manager"}, "$.spec.vgpuManager.repository", "an image of your own"),
        ({"repository": "r", "image": "m"}, "$.spec.vgpuManager.version", "beside repository r and image m"),
    ],
)
def test_an_incomplete_image_is_a_fault_and_other_operands_are_rendered(image: Plain, path: str, reported: str) -> None:
    assert isinstance(image, dict)
    found = render(sandbox(vgpuManager={"enabled": True, **image}), INPUTS)
    (fault,) = (fault for fault in found.faults if fault.operand is OperandName.VGPU_MANAGER)
    assert (fault.because.path, reported in fault.because.message) == (path, True)
    assert "gpuvirt-node" in daemon_sets(found)
    assert OperandName.VGPU_MANAGER in found.operands


def test_module_parameter_files_are_mounted_singly_from_an_existing_config_map() -> None:
    policy = sandbox(vgpuManager={**VGPU, "kernelModuleConfig": {"name": "kernel-module-params"}})
    assert config_maps_of(policy) == {"kernel-module-params"}
    manager = daemon_sets(render(policy, INPUTS))["nvidia-vgpu-manager-daemonset-ubuntu22.04"]
    mounts = [mount for mount in main_of(manager).volume_mounts if mount.mount_path.startswith("/drivers")]
    assert [(mount.mount_path, mount.sub_path) for mount in mounts] == [
        ("/drivers/b.conf", "b.conf"),
        ("/drivers/nvidia.conf", "nvidia.conf"),
    ]
    (fault,) = render(policy, replace(INPUTS, config_maps={})).faults
    assert fault.because.path == "$.spec.vgpuManager.kernelModuleConfig.name"
    assert "kubectl create configmap kernel-module-params" in fault.because.message


@pytest.mark.parametrize(
    ("identity", "version", "tag"),
    [
        ("ubuntu", "22.04", "ubuntu22.04"),
        ("rhel", "9.4", "rhel9"),
        ("rocky", "8", "rocky8"),
        ("rhcos", "4.14", "rhcos4.14"),
    ],
)
def test_tags_of_operating_systems(identity: str, version: str, tag: str) -> None:
    assert os_tag(identity, version) == tag


# --- common settings


def test_common_daemonset_settings_apply_to_all_daemonsets() -> None:
    common = {
        "labels": {"team": "gpu", "app": "mine", "app.kubernetes.io/managed-by": "me", "gpuvirt.io/template": "x"},
        "annotations": {"note": "n"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "priorityClassName": "low",
    }
    for daemon in daemon_sets(render(sandbox(vgpuManager=VGPU, daemonsets=common), INPUTS)).values():
        for labels in (daemon.metadata.labels, daemon.spec.template.metadata.labels):
            assert labels["team"] == "gpu"
            assert labels["app"] != "mine"
            assert labels["app.kubernetes.io/managed-by"] == "gpuvirt"
        assert daemon.spec.template.metadata.annotations["note"] == "n"
        assert [taint.key for taint in daemon.spec.template.spec.tolerations] == ["a"]
        assert daemon.spec.template.spec.priority_class_name == "low"


def test_environment_variables_are_unique_and_the_policy_wins() -> None:
    env = [{"name": "GPUVIRT_SYSTEM_ROOT", "value": "/x"}, {"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    container = main_of(agent_of(render(sandbox(sandboxDevicePlugin={"env": env}), INPUTS)))
    assert value_of(container, "A") == "2"
    assert value_of(container, "GPUVIRT_SYSTEM_ROOT") == "/x"


def test_the_template_label_distinguishes_current_pods_from_outdated_pods() -> None:
    before = agent_of(render(sandbox(), INPUTS))
    assert template_of(agent_of(render(sandbox(), INPUTS))) == template_of(before)
    newer = agent_of(render(sandbox(), replace(INPUTS, image="registry.example/gpuvirt:2")))
    assert template_of(newer) != template_of(before)
    assert template_of(newer) == newer.spec.template.metadata.labels["gpuvirt.io/template"]


# --- any policy


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(specs())
def test_any_policy_renders(spec: object) -> None:
    found = render(policy_of(spec), ALL_KINDS)
    again = render(policy_of(spec), ALL_KINDS)
    assert [encoded(manifest) for manifest in found.manifests] == [encoded(manifest) for manifest in again.manifests]
    places = [(resource_of(manifest).path, manifest.metadata.name) for manifest in found.manifests]
    assert len(places) == len(set(places)), "each object is rendered once"
    for manifest in found.manifests:
        assert msgspec.json.decode(encoded(manifest), type=Manifest) == manifest
        assert manifest.metadata.labels["app.kubernetes.io/managed-by"] == "gpuvirt"
        if isinstance(manifest, DaemonSet):
            check(manifest)
    for fault in found.faults:
        assert fault.because.path.startswith("$.spec.")
        assert not daemon_sets(found).get(fault.operand.value)


def check(found: DaemonSet) -> None:
    """Check what the API server requires of each object."""
    template = found.spec.template
    assert found.spec.selector.match_labels.items() <= template.metadata.labels.items()
    volumes = [volume.name for volume in template.spec.volumes]
    assert len(volumes) == len(set(volumes))
    for container in (*template.spec.init_containers, *template.spec.containers):
        for keys in (
            [variable.name for variable in container.env],
            [mount.mount_path for mount in container.volume_mounts],
        ):
            assert len(keys) == len(set(keys)), keys
        assert {mount.name for mount in container.volume_mounts} <= set(volumes)


def test_the_full_policy_renders_without_a_fault() -> None:
    found = render(full(), ALL_KINDS)
    assert found.faults == ()
    # The NRI plugin gives GPUs to pods in place of RuntimeClasses; NVIDIA's policy has no MPS daemon.
    assert found.operands == set(OperandName) - {OperandName.RUNTIME_CLASSES, OperandName.MPS}
