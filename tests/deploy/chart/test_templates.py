"""The manifests that helm renders of the chart and values."""

from pathlib import Path

import msgspec
import pytest
import yaml

from gpuvirt import __version__
from gpuvirt.controller.operands.images import image_of
from gpuvirt.controller.policy.policies import unsupported
from gpuvirt.kube.kinds.clusterpolicy import ClusterPolicy, StoredPolicy, read_policy
from gpuvirt.kube.kinds.operandparts import ImageParts
from gpuvirt.kube.kinds.vmoperands import OnDemandVgpus
from gpuvirt.model.desired.settings import IdleCount, OnDemandNames
from gpuvirt.model.desired.vgpuconfig import Sizes
from gpuvirt.plain import Plain
from tests.controller.operands.operandaccounts import objects
from tests.deploy.chart.helmchart import CHART, NAMESPACE, ROOT, Helm, Manifest, Rendered, at, items, one_line

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

GUIDE = ("sandboxWorkloads.enabled=true",)
GUIDE_VGPU = (
    *GUIDE,
    "vgpuManager.enabled=true",
    "vgpuManager.repository=my/private/registry",
    "vgpuManager.image=vgpu-manager",
    "vgpuManager.version=510.73.06",
    "vgpuManager.imagePullSecrets={registry-secret}",
)
REGISTRY = (*GUIDE, "nvidiaRegistry=registry.example:5000/mirror/")
CONTAINER_PARTS = ("driver", "toolkit", "devicePlugin", "dcgm", "dcgmExporter", "gfd")


def policy(rendered: Rendered) -> ClusterPolicy:
    """Return the policy as the controller decodes it."""
    content = msgspec.json.encode(rendered.policy)
    read = read_policy(msgspec.json.decode(content, type=StoredPolicy))
    assert isinstance(read, ClusterPolicy), read
    return read


def rules(manifest: Manifest) -> list[Plain]:
    return items(at(manifest, "rules"))


def test_helm_lint_passes(helm: Helm) -> None:
    done = helm.run("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


def test_the_guides_first_install_command_renders(helm: Helm) -> None:
    spec = policy(helm.template(*GUIDE)).spec
    assert spec.sandbox_workloads.enabled
    assert spec.sandbox_workloads.default_workload == "container"
    assert (spec.vgpu_manager.enabled, spec.vfio_manager.enabled) == (False, True)
    assert (spec.vgpu_device_manager.enabled, spec.sandbox_device_plugin.enabled) == (True, True)
    parts = (spec.driver, spec.toolkit, spec.device_plugin, spec.dcgm, spec.dcgm_exporter, spec.gfd)
    assert [part.enabled for part in parts] == [True] * len(parts), "the guide's node A has all these operands"
    assert [image_of(part, "$.spec", {}, "") for part in (*parts, spec.driver.manager)] == [
        "nvcr.io/nvidia/driver:595.91.07",
        "nvcr.io/nvidia/k8s/container-toolkit:v1.20.0",
        "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
        "nvcr.io/nvidia/cloud-native/dcgm:4.6.0-1-ubuntu24.04",
        "nvcr.io/nvidia/k8s/dcgm-exporter:4.6.0-4.8.3-distroless",
        "nvcr.io/nvidia/k8s-device-plugin:v0.20.0",
        "nvcr.io/nvidia/cloud-native/k8s-driver-manager:v0.12.0",
    ]
    assert [toleration.key for toleration in spec.daemonsets.tolerations] == ["nvidia.com/gpu"]


def test_the_guides_second_install_command_renders(helm: Helm) -> None:
    manager = policy(helm.template(*GUIDE_VGPU)).spec.vgpu_manager
    assert manager.enabled
    assert (manager.repository, manager.image, manager.version) == ("my/private/registry", "vgpu-manager", "510.73.06")
    assert manager.image_pull_secrets == ("registry-secret",)


def test_a_full_vgpu_manager_image_reference_reaches_the_policy(helm: Helm) -> None:
    rendered = helm.template(*GUIDE, "vgpuManager.enabled=true", "vgpuManager.image=registry.example/vgpu-manager:1")
    assert policy(rendered).spec.vgpu_manager.image == "registry.example/vgpu-manager:1"


@pytest.mark.parametrize(
    ("registry", "toolkit"),
    [
        ("nvcr.io", "nvcr.io/nvidia/k8s"),
        ("nvcr.io/nvidia/", "nvcr.io/nvidia/k8s"),
        ("registry.example:5000/mirror", "registry.example:5000/mirror/nvidia/k8s"),
        ("registry.example/mirror/nvidia", "registry.example/mirror/nvidia/k8s"),
    ],
)
def test_the_registry_may_end_with_nvidias_folder(helm: Helm, registry: str, toolkit: str) -> None:
    spec = policy(helm.template(*GUIDE, f"nvidiaRegistry={registry}")).spec
    assert spec.toolkit.repository == toolkit
    assert spec.driver.repository == toolkit.removesuffix("/k8s")
    assert spec.driver.manager.repository == toolkit.replace("/k8s", "/cloud-native")


@pytest.mark.parametrize("value", ["2", "10%"])
def test_max_unavailable_may_be_a_number(helm: Helm, value: str) -> None:
    rolling = policy(helm.template(*GUIDE, f"daemonsets.rollingUpdate.maxUnavailable={value}")).spec.daemonsets
    assert rolling.rolling_update is not None
    assert rolling.rolling_update.max_unavailable == value


def test_versions_and_tags_of_digits_stay_text(helm: Helm) -> None:
    manager = [value.replace("510.73.06", "550") for value in GUIDE_VGPU]
    rendered = helm.template(*manager, "driver.version=580", "image.tag=20260101", "dcgm.version=4")
    spec = policy(rendered).spec
    assert (spec.vgpu_manager.version, spec.driver.version, spec.dcgm.version) == ("550", "580", "4")
    assert at(rendered.pods()["gpuvirt-controller"], "containers", 0, "image") == "gpuvirt:20260101"


def test_nvidias_registry_enables_all_container_components(helm: Helm) -> None:
    rendered = helm.template(*REGISTRY, *GUIDE_VGPU)
    spec = policy(rendered).spec
    parts: list[ImageParts] = [spec.driver, spec.toolkit, spec.device_plugin, spec.dcgm, spec.dcgm_exporter, spec.gfd]
    parts.append(spec.driver.manager)
    assert all(part.repository.startswith("registry.example:5000/mirror/nvidia") for part in parts)
    assert all(part.image and part.version for part in parts)
    assert [at(rendered.policy, "spec", name, "enabled") for name in CONTAINER_PARTS] == [True] * len(CONTAINER_PARTS)
    assert spec.toolkit.repository == "registry.example:5000/mirror/nvidia/k8s"


def test_a_component_with_its_own_repository_is_enabled_and_a_disabled_component_stays_disabled(helm: Helm) -> None:
    spec = policy(helm.template(*GUIDE, "nvidiaRegistry=", "toolkit.repository=registry.example/a")).spec
    assert (spec.toolkit.enabled, spec.toolkit.repository) == (True, "registry.example/a")
    assert not spec.driver.enabled
    assert not policy(helm.template(*REGISTRY, "driver.enabled=false")).spec.driver.enabled


def test_values_reach_the_policy(helm: Helm) -> None:
    rendered = helm.template(
        *GUIDE,
        "sandboxWorkloads.defaultWorkload=vm-vgpu",
        "vgpuDeviceManager.config.name=mine",
        "hostPaths.kubeletRootDir=/data/kubelet",
        "daemonsets.rollingUpdate.maxUnavailable=10%",
        "ccManager.defaultMode=devtools",
        "driver.repository=registry.example/a",
        "driver.manager.repository=registry.example/b",
        "driver.upgradePolicy.autoUpgrade=true",
        "sandboxDevicePlugin.requireReset=false",
        "sandboxDevicePlugin.resourcesWithoutGpus={example.com/nic}",
        "sandboxDevicePlugin.onDemand.types={A10-4Q}",
        "sandboxDevicePlugin.onDemand.sizes=mixed",
    )
    spec = policy(rendered).spec
    assert spec.sandbox_device_plugin.require_reset is False
    assert spec.sandbox_device_plugin.resources_without_gpus == ("example.com/nic",)
    assert spec.sandbox_device_plugin.on_demand == OnDemandVgpus(
        names=OnDemandNames.NUMBER,
        prefix="tencent.com/vgpu-",
        types=("A10-4Q",),
        idle_count=IdleCount.ONE,
        sizes=Sizes.MIXED,
    )
    assert spec.sandbox_workloads.default_workload == "vm-vgpu"
    assert spec.vgpu_device_manager.config is not None
    assert spec.vgpu_device_manager.config.name == "mine"
    assert spec.host_paths.kubelet_root_dir == "/data/kubelet"
    assert at(rendered.policy, "spec", "daemonsets", "rollingUpdate", "maxUnavailable") == "10%"
    assert at(rendered.policy, "spec", "ccManager", "defaultMode") == "devtools"
    assert at(rendered.policy, "spec", "driver", "upgradePolicy", "autoUpgrade") is True


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("sandboxWorkload.enabled=true", "additional properties 'sandboxWorkload' not allowed"),
        (
            "sandboxWorkloads.defaultWorkload=vm",
            "'/sandboxWorkloads/defaultWorkload': value must be one of 'container'",
        ),
        ("sandboxWorkloads.enabled=maybe", "'/sandboxWorkloads/enabled': got string, want boolean"),
        ("vgpuManager.imagePullSecrets=name", "'/vgpuManager/imagePullSecrets': got string, want array"),
        ("vgpuManager.repository=https://registry.example", "'/vgpuManager/repository': 'https://registry.example'"),
        ("daemonsets.rollingUpdate.maxUnavailable=0%", "'/daemonsets/rollingUpdate/maxUnavailable': '0%'"),
        ("operator.replicas=two", "'/operator/replicas': got string, want integer"),
        ("image.tag=a b", "'/image/tag': 'a b'"),
        ("sandboxWorkloads.mode=xen", "'/sandboxWorkloads/mode': value must be one of 'kubevirt', 'kata'"),
        ("kata.enabled=true", "kata.enabled: no node is for VMs; set sandboxWorkloads.enabled=true, too"),
        ("vgpuManager.enabled=true", "set vgpuManager.repository and vgpuManager.version, too"),
        ("daemonsets.rollingUpdate.maxUnavailable=0", "'/daemonsets/rollingUpdate/maxUnavailable': minimum: got 0"),
        ("nvidiaRegistry=,driver.enabled=true", "set driver.repository, or nvidiaRegistry for all operands"),
        ("nvidiaRegistry=,driver.repository=registry.example/a", "set driver.manager.repository too"),
        ("nvidiaRegistry=nvcr.io/nvidia/cloud-native", "so end it with nvidia"),
        ("gpuCluster.deployCR=true", "gpuvirt does not read GPUCluster objects; leave it out"),
        ("driver.nvidiaDriverCRD.enabled=true", "set driver.repository and driver.version instead"),
    ],
)
def test_invalid_values_are_refused_with_the_path_and_the_fix(helm: Helm, value: str, words: str) -> None:
    assert words in helm.refusal(value)


def test_no_policy_is_created_if_values_disable_the_policy(helm: Helm) -> None:
    assert {"gpuvirt-crds", "gpuvirt-policy"} <= helm.template().named("Job").keys()
    assert "gpuvirt-policy" not in helm.template("clusterPolicy.deployCR=false").named("Job")


@pytest.mark.parametrize("values", [GUIDE, (*GUIDE, "operator.cleanupCRD=true", "operator.replicas=2")])
def test_pods_of_gpuvirt_have_minimal_privileges(helm: Helm, values: tuple[str, ...]) -> None:
    pods = helm.template(*values).pods()
    assert "gpuvirt-controller" in pods
    for name, pod in pods.items():
        assert at(pod, "securityContext", "runAsNonRoot") is True, name
        assert at(pod, "securityContext", "seccompProfile", "type") == "RuntimeDefault", name
        assert not any(at(pod, field) for field in ("hostPID", "hostNetwork", "hostIPC")), name
        for container in items(at(pod, "containers")):
            may = at(container, "securityContext")
            assert at(may, "capabilities") == {"drop": ["ALL"]}, name
            assert (at(may, "allowPrivilegeEscalation"), at(may, "readOnlyRootFilesystem")) == (False, True), name
            assert at(container, "resources", "requests"), name
            assert at(container, "resources", "limits", "memory"), name


def test_two_controllers_have_anti_affinity_and_a_disruption_budget(helm: Helm) -> None:
    one, two = helm.template(*GUIDE), helm.template(*GUIDE, "operator.replicas=2")
    assert not one.named("PodDisruptionBudget")
    assert at(two.one("PodDisruptionBudget", "gpuvirt-controller"), "spec", "maxUnavailable") == 1
    anti = ("affinity", "podAntiAffinity")
    assert at(one.pods()["gpuvirt-controller"], *anti) is None
    assert at(two.pods()["gpuvirt-controller"], *anti, "preferredDuringSchedulingIgnoredDuringExecution")
    labels = at(two.one("Deployment", "gpuvirt-controller"), "spec", "selector", "matchLabels")
    assert at(two.one("PodDisruptionBudget", "gpuvirt-controller"), "spec", "selector", "matchLabels") == labels


def test_the_controller_knows_its_image_and_its_namespace(helm: Helm) -> None:
    digest = f"sha256:{'0' * 64}"
    pod = helm.template(*GUIDE, "image.repository=registry.example/gpuvirt", f"image.tag={digest}").pods()
    container = at(pod["gpuvirt-controller"], "containers", 0)
    image = f"registry.example/gpuvirt@{digest}"
    assert at(container, "image") == image
    assert {"name": "GPUVIRT_IMAGE", "value": image} in items(at(container, "env"))
    assert {"name": "GPUVIRT_IMAGE_PULL_POLICY", "value": "IfNotPresent"} in items(at(container, "env"))
    assert at(container, "env", 0, "valueFrom", "fieldRef", "fieldPath") == "metadata.namespace"
    assert at(helm.template().pods()["gpuvirt-controller"], "containers", 0, "image") == f"gpuvirt:{__version__}"


def test_the_coexist_value_sets_the_controllers_option(helm: Helm) -> None:
    def arguments(*values: str) -> Plain:
        return at(helm.template(*values).pods()["gpuvirt-controller"], "containers", 0, "args")

    assert "--coexist" in items(arguments("operator.coexist=true"))
    assert "--coexist" not in items(arguments())


def test_roles_allow_no_kubevirt_patch_if_unmanaged_but_allow_the_uninstall_to_revert(helm: Helm) -> None:
    def may(role: str, *values: str) -> dict[str, list[Plain]]:
        found = rules(helm.template(*values).one("ClusterRole", f"gpuvirt-{role}"))
        return {str(at(rule, "resources", 0)): items(at(rule, "verbs")) for rule in found}

    def arguments(*values: str) -> list[Plain]:
        return items(at(helm.template(*values).pods()["gpuvirt-controller"], "containers", 0, "args"))

    off = "kubevirt.manage=false"
    assert ("--no-kubevirt" in arguments(off), "--no-kubevirt" in arguments()) == (True, False)
    for kind in ("kubevirts", "hyperconvergeds"):
        assert may("controller")[kind] == ["list", "watch", "patch"]
        assert may("controller", off)[kind] == ["list", "watch"]
        assert may("uninstall", off)[kind] == ["list", "patch"], "the previous values"


def test_secrets_pull_the_images_of_all_our_pods(helm: Helm) -> None:
    rendered = helm.template(*GUIDE, "image.pullSecrets={mine}")
    found = rendered.named("ServiceAccount")
    assert {"gpuvirt-controller", "gpuvirt-node"} <= found.keys()
    ours = {name: manifest for name, manifest in found.items() if name.startswith("gpuvirt-")}
    assert all(at(resource, "imagePullSecrets") == [{"name": "mine"}] for resource in ours.values())
    reported = {"name": "GPUVIRT_IMAGE_PULL_SECRETS", "value": "mine"}
    assert reported in items(at(rendered.pods()["gpuvirt-controller"], "containers", 0, "env"))
    assert {at(pod, "serviceAccountName") for pod in rendered.pods().values()} <= found.keys()


@pytest.mark.parametrize("name", ["node.yaml", "discover.yaml"])
def test_the_agents_roles_equal_those_of_the_plain_manifests(helm: Helm, name: str) -> None:
    rendered = helm.template(*GUIDE)
    manifests = yaml.safe_load_all((ROOT / "deploy" / name).read_text().replace(":gpuvirt:", f":{NAMESPACE}:"))
    kinds = {"ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    chosen = [manifest for manifest in manifests if manifest["kind"] in kinds | {"Role", "RoleBinding"}]
    assert kinds <= {manifest["kind"] for manifest in chosen}
    # The policy names the ConfigMap, so the controller creates this role.
    chosen = [
        manifest for manifest in chosen if manifest["kind"] in kinds or manifest["metadata"]["name"] != "gpuvirt-node"
    ]
    for desired in chosen:
        found = rendered.one(desired["kind"], desired["metadata"]["name"])
        for subject in desired.get("subjects", ()):
            subject["namespace"] = NAMESPACE
        for part in ("rules", "roleRef", "subjects", "spec"):
            assert at(found, part) == desired.get(part)


def test_admission_policies_restrict_agents_to_their_nodes_since_kubernetes_1_32(helm: Helm) -> None:
    old, new = (
        helm.template(*GUIDE, options=("--kube-version", version)).named("ValidatingAdmissionPolicy")
        for version in ("1.31.9", "1.32.0")
    )
    assert (set(old), set(new)) == (set(), {"gpuvirt-node", "gpuvirt-gpunode", "gpuvirt-discover"})


def test_claims_have_rights_and_a_class_where_their_scheduler_gives_no_gpu_twice(helm: Helm) -> None:
    newest = ("--kube-version", "1.36.3")
    assert "gpuvirt-node-claims" not in helm.template(*GUIDE, options=newest).named("ClusterRole")
    rendered = helm.template(*GUIDE, "dra.enabled=true", options=newest)
    assert rendered.one("DeviceClass", "passthrough.gpuvirt.io")
    for desired in yaml.safe_load_all((ROOT / "deploy/claims.yaml").read_text()):
        found = rendered.one(desired["kind"], desired["metadata"]["name"])
        assert at(found, "rules") == desired.get("rules")
    account = f'"system:serviceaccount:{NAMESPACE}:gpuvirt-node"'
    policy = rendered.one("ValidatingAdmissionPolicy", "gpuvirt-slices")
    assert account in str(at(policy, "spec", "matchConditions", 0, "expression"))
    assert "Kubernetes 1.36.3" in helm.refusal("dra.enabled=true", options=("--kube-version", "1.35.1"))


def test_the_discoverer_is_rendered_if_no_other_program_discovers_nodes(helm: Helm) -> None:
    def discovers(*values: str) -> bool:
        rendered = helm.template(*values)
        kinds = ("DaemonSet", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")
        names = {"gpuvirt-discover" in rendered.named(kind) for kind in kinds}
        assert len(names) == 1, "either all objects of the discoverer or none"
        return names.pop()

    assert discovers()
    assert not discovers("nfd.enabled=true")
    assert discovers("nfd.enabled=true", "discover.enabled=true")
    assert not discovers("discover.enabled=false")


def test_the_discoverer_equals_the_plain_manifest_with_the_charts_image(helm: Helm) -> None:
    manifests = yaml.safe_load_all((ROOT / "deploy/discover.yaml").read_text())
    (desired,) = (manifest["spec"] for manifest in manifests if manifest["kind"] == "DaemonSet")
    (container,) = desired["template"]["spec"]["containers"]
    container |= {"image": "registry.example/gpuvirt:v1", "imagePullPolicy": "Always"}
    image = ("image.repository=registry.example/gpuvirt", "image.tag=v1", "image.pullPolicy=Always")
    rendered = helm.template(*GUIDE, *image)
    assert at(rendered.one("DaemonSet", "gpuvirt-discover"), "spec") == desired


def test_the_namespace_is_labelled_only_if_values_say_so(helm: Helm) -> None:
    def labels(rendered: Rendered) -> list[Plain]:
        role = rendered.one("ClusterRole", "gpuvirt-install")
        return [at(rule, "resourceNames") for rule in rules(role) if at(rule, "resources") == ["namespaces"]]

    plain, privileged = helm.template(*GUIDE), helm.template(*GUIDE, "psa.enabled=true")
    assert (labels(plain), labels(privileged)) == ([], [[NAMESPACE]])
    assert "gpuvirt-namespace" not in plain.pods()
    job = privileged.pods()["gpuvirt-namespace"]
    assert at(job, "containers", 0, "args") == ["install", "namespace", NAMESPACE]


@pytest.mark.parametrize("values", [(), GUIDE, GUIDE_VGPU, REGISTRY, (*REGISTRY, "dcgm.enabled=true")])
def test_the_default_policy_has_no_unsupported_field(helm: Helm, values: tuple[str, ...]) -> None:
    assert unsupported(at(helm.template(*values).policy, "spec")) == ()


def test_service_accounts_of_operands_are_rendered(helm: Helm) -> None:
    rendered = helm.template(*GUIDE)
    for desired in objects(NAMESPACE):
        assert rendered.one(str(desired["kind"]), str(at(desired, "metadata", "name"))) == desired


def test_the_charts_crds_equal_those_of_the_manifests(helm: Helm) -> None:
    rendered = helm.template(*GUIDE)
    data = at(rendered.one("ConfigMap", "gpuvirt-crds"), "data")
    assert isinstance(data, dict)
    assert sorted(data) == ["clusterpolicies.yaml", "gpunodes.yaml", "vgpuschedules.yaml"]
    for name, text in data.items():
        assert text == (ROOT / "deploy" / name).read_text()
    names = sorted(yaml.safe_load(str(text))["metadata"]["name"] for text in data.values())
    for role in (rendered, helm.template("operator.cleanupCRD=true")):
        kinds = [
            at(rule, "resourceNames")
            for cluster_role in role.named("ClusterRole").values()
            for rule in rules(cluster_role)
            if at(rule, "resources") == ["customresourcedefinitions"]
        ]
        assert kinds
        assert all(sorted(map(str, items(kind))) == names for kind in kinds)


def test_existing_crds_can_be_kept(helm: Helm) -> None:
    def arguments(*values: str) -> Plain:
        return at(helm.template(*values).pods()["gpuvirt-crds"], "containers", 0, "args")

    assert arguments() == ["install", "crds", "/given"]
    assert arguments("operator.upgradeCRD=false") == ["install", "crds", "/given", "--only-missing"]


def test_hook_jobs_run_in_order_and_are_deleted(helm: Helm) -> None:
    rendered = helm.template(*GUIDE)
    hooks = {str(at(hook, "metadata", "name")): at(hook, "metadata", "annotations") for hook in rendered.hooks()}
    assert {name.removeprefix("gpuvirt-") for name in hooks} == {"install", "crds", "policy", "uninstall", "test"}
    assert at(hooks["gpuvirt-crds"], "helm.sh/hook") == "pre-install,pre-upgrade"
    assert at(hooks["gpuvirt-policy"], "helm.sh/hook") == "post-install,post-upgrade,post-rollback"
    assert at(hooks["gpuvirt-uninstall"], "helm.sh/hook") == "pre-delete"
    assert at(hooks["gpuvirt-test"], "helm.sh/hook") == "test"
    assert all("hook-succeeded" in str(at(hook, "helm.sh/hook-delete-policy")) for hook in hooks.values())


def test_network_policies_allow_metrics_in_and_the_api_server_out(helm: Helm) -> None:
    found = helm.template(*GUIDE, "networkPolicy.apiServerPorts={16443}").named("NetworkPolicy")
    everywhere = at(found["gpuvirt"], "spec")
    assert at(everywhere, "podSelector", "matchLabels") == {"app.kubernetes.io/name": "gpuvirt"}
    assert (at(everywhere, "policyTypes"), at(everywhere, "ingress")) == (["Ingress", "Egress"], None)
    assert at(everywhere, "egress", 0, "ports") == [{"protocol": "TCP", "port": 16443}]
    ports = {
        name: at(manifest, "spec", "ingress", 0, "ports", 0, "port")
        for name, manifest in found.items()
        if name != "gpuvirt"
    }
    assert ports == {"gpuvirt-controller-metrics": 8080, "gpuvirt-discover-metrics": 9410, "gpuvirt-node-metrics": 9410}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    readers = [at(manifest, "spec", "ingress", 0, "from") for name, manifest in found.items() if name != "gpuvirt"]
    assert readers == [[monitoring]] * 3
    assert list(helm.template(*GUIDE, "networkPolicy.metricsFrom=null").named("NetworkPolicy")) == ["gpuvirt"]
    assert not helm.template("networkPolicy.enabled=false").named("NetworkPolicy")


def test_the_packaged_chart_renders_as_its_folder(helm: Helm, tmp_path: Path) -> None:
    done = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert helm.template(*GUIDE, chart=tmp_path / f"gpuvirt-{__version__}.tgz") == helm.template(*GUIDE)


def test_notes_name_the_next_steps(helm: Helm) -> None:
    def notes(*values: str) -> str:
        options = ["install", "x", str(CHART), "--dry-run=client", f"--namespace={NAMESPACE}"]
        done = helm.run(*options, *(f"--set={value}" for value in values))
        assert done.returncode == 0, done.stderr
        return one_line(done.stdout.partition("NOTES:")[2])

    plain, vgpu = notes(*GUIDE), notes(*GUIDE_VGPU, "psa.enabled=true", "nvidiaRegistry=registry.example")
    assert "kubectl label node NODE --overwrite nvidia.com/gpu.workload.config=vm-passthrough" in plain
    assert "kubectl get gpunodes" in plain
    assert "kubectl label namespace gpu-operator pod-security" in plain
    assert "the hosts of vm-vgpu and on-demand nodes must already have NVIDIA's vGPU driver" in plain
    assert "pod-security" not in vgpu
    assert "vGPU driver" not in vgpu
    assert "upgrade with --set sandboxWorkloads.enabled=true" in notes()


def test_the_test_pod_may_only_read(helm: Helm) -> None:
    rendered = helm.template(*GUIDE)
    roles = [rendered.one(kind, "gpuvirt-test") for kind in ("ClusterRole", "Role")]
    verbs = {str(verb) for role in roles for rule in rules(role) for verb in items(at(rule, "verbs"))}
    assert verbs == {"get", "list"}
    pod = rendered.one("Pod", "gpuvirt-test")
    assert at(pod, "spec", "containers", 0, "args", 1) == "verify"
    assert at(pod, "spec", "serviceAccountName") == "gpuvirt-test"
    policy = at(pod, "metadata", "annotations", "helm.sh/hook-delete-policy")
    assert policy == "before-hook-creation,hook-succeeded", "a passed test leaves nothing"
