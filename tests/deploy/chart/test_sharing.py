"""The chart's objects for shares of GPUs: the extender, and the second kube-scheduler."""

import pytest

from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import CHART, NAMESPACE, Helm, Rendered, at, items, one_line

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

EXTENDER = ("extender.enabled=true",)
BOTH = (*EXTENDER, "scheduler.enabled=true")
NAMES = {"gpuvirt-extender", "gpuvirt-scheduler"}


def named(rendered: Rendered) -> set[str]:
    """Return the names of all objects for shares."""
    found = {str(at(manifest, "metadata", "name")) for manifest in rendered.manifests}
    return {name for name in found if name.startswith(tuple(NAMES))}


def container(rendered: Rendered, name: str) -> Plain:
    return at(rendered.pods()[name], "containers", 0)


def rights(rendered: Rendered, kind: str, name: str) -> dict[str, list[Plain]]:
    """Return the verbs of a role by resource."""
    rules = items(at(rendered.one(kind, name), "rules"))
    return {str(item): items(at(rule, "verbs")) for rule in rules for item in items(at(rule, "resources"))}


def test_nothing_is_shared_by_default(helm: Helm) -> None:
    rendered = helm.template()
    assert named(rendered) == set()
    assert not any(
        "--shared-resource" in str(item) for item in items(at(container(rendered, "gpuvirt-controller"), "args"))
    )


def test_the_controller_writes_the_configuration_for_the_extenders_resource(helm: Helm) -> None:
    rendered = helm.template(*EXTENDER, "extender.resource=nvidia.com/share", "extender.units=100")
    arguments = items(at(container(rendered, "gpuvirt-controller"), "args"))
    assert {"--shared-resource=nvidia.com/share", "--shared-units=100"} <= set(arguments)
    assert "--resource=nvidia.com/share" in items(at(container(rendered, "gpuvirt-extender"), "args"))


def test_the_extender_has_its_values_as_options(helm: Helm) -> None:
    rendered = helm.template(
        *EXTENDER,
        "extender.units=100",
        "extender.policy=spread",
        "extender.replicas=3",
        "extender.placeTimeoutSeconds=90",
    )
    found = items(at(container(rendered, "gpuvirt-extender"), "args"))
    assert {"extender", "--listen=:8888", "--units=100", "--policy=spread", "--place-timeout=90"} <= set(found)
    assert at(rendered.one("Deployment", "gpuvirt-extender"), "spec", "replicas") == 3


def test_an_upgrade_starts_a_replica_before_it_ends_one(helm: Helm) -> None:
    spec = at(helm.template(*EXTENDER).one("Deployment", "gpuvirt-extender"), "spec")
    assert at(spec, "replicas") == 2
    assert at(spec, "strategy", "rollingUpdate") == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_drain_evicts_one_extender_at_a_time(helm: Helm) -> None:
    rendered = helm.template(*EXTENDER)
    budget = at(rendered.one("PodDisruptionBudget", "gpuvirt-extender"), "spec")
    assert at(budget, "maxUnavailable") == 1
    labels = at(rendered.one("Deployment", "gpuvirt-extender"), "spec", "selector", "matchLabels")
    assert at(budget, "selector", "matchLabels") == labels
    alone = helm.template(*EXTENDER, "extender.replicas=1").named("PodDisruptionBudget")
    assert "gpuvirt-extender" not in alone, "it would block each drain"


@pytest.mark.parametrize("values", [(), ("extender.tls.secretName=cert",)], ids=["http", "https"])
def test_probes_and_metrics_have_a_port_of_their_own(helm: Helm, values: tuple[str, ...]) -> None:
    """Prometheus may connect to it, although it may bind no pods, and the kubelet has no client certificate."""
    rendered = helm.template(*BOTH, *values)
    extender = container(rendered, "gpuvirt-extender")
    assert "--metrics-listen=:8889" in items(at(extender, "args"))
    assert {"name": "metrics", "containerPort": 8889} in items(at(extender, "ports"))
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        assert at(extender, probe, "httpGet") == {"path": path, "port": "metrics"}
    service = at(rendered.one("Service", "gpuvirt-extender-metrics"), "spec")
    assert items(at(service, "ports")) == [{"name": "metrics", "port": 8889, "targetPort": "metrics"}]
    assert at(service, "selector") == at(
        rendered.one("Deployment", "gpuvirt-extender"), "spec", "selector", "matchLabels"
    )


def test_prometheus_may_read_the_extenders_metrics_and_not_ask_it(helm: Helm) -> None:
    policies = helm.template(*EXTENDER).named("NetworkPolicy")
    (ingress,) = items(at(policies["gpuvirt-extender-metrics"], "spec", "ingress"))
    assert items(at(ingress, "ports")) == [{"protocol": "TCP", "port": 8889}]
    assert at(ingress, "from", 0, "namespaceSelector", "matchLabels") == {"kubernetes.io/metadata.name": "monitoring"}
    (verbs,) = items(at(policies["gpuvirt-extender"], "spec", "ingress"))
    assert items(at(verbs, "ports")) == [{"protocol": "TCP", "port": 8888}]
    assert "namespaceSelector" not in str(at(verbs, "from"))


def test_the_extenders_service_leads_where_the_leader_says(helm: Helm) -> None:
    rendered = helm.template(*BOTH)
    service = at(rendered.one("Service", "gpuvirt-extender"), "spec")
    assert items(at(service, "ports")) == [{"name": "http", "port": 8888, "targetPort": 8888}]
    assert at(service, "selector") is None, "Kubernetes would write slices with all replicas"
    assert at(service, "clusterIP") is None, "a headless Service has no address that a static pod can use"
    extender = container(rendered, "gpuvirt-extender")
    assert "--service=gpuvirt-extender" in items(at(extender, "args"))
    fields = {at(item, "name"): at(item, "valueFrom", "fieldRef", "fieldPath") for item in items(at(extender, "env"))}
    assert fields == {"GPUVIRT_NAMESPACE": "metadata.namespace", "GPUVIRT_POD_IPS": "status.podIPs"}


def test_the_extender_may_bind_pods_and_change_nothing_else(helm: Helm) -> None:
    rendered = helm.template(*BOTH)
    assert rights(rendered, "ClusterRole", "gpuvirt-extender") == {
        "nodes": ["list", "watch"],
        "pods": ["get", "list", "watch"],
        "poddisruptionbudgets": ["list", "watch"],
        "runtimeclasses": ["list", "watch"],
        "pods/binding": ["create"],
        "pods/status": ["patch"],
    }
    policy = rendered.one("ValidatingAdmissionPolicy", "gpuvirt-extender")
    account = f'"system:serviceaccount:{NAMESPACE}:gpuvirt-extender"'
    assert account in str(at(policy, "spec", "matchConditions", 0, "expression"))
    assert rendered.one("ValidatingAdmissionPolicyBinding", "gpuvirt-extender")
    old = helm.template(*BOTH, options=("--kube-version", "1.29.9"))
    assert "gpuvirt-extender" not in old.named("ValidatingAdmissionPolicy")
    own = items(at(rendered.one("Role", "gpuvirt-extender"), "rules"))
    verbs = [(at(rule, "resources", 0), bool(at(rule, "resourceNames")), items(at(rule, "verbs"))) for rule in own]
    assert verbs == [
        ("leases", False, ["create"]),
        ("leases", True, ["get", "update"]),
        ("services", True, ["get"]),
        ("endpointslices", False, ["create"]),
        ("endpointslices", True, ["get", "update"]),
        ("endpointslices/restricted", False, ["create"]),
    ]


def test_the_second_scheduler_has_the_rights_of_a_scheduler_and_a_lease_of_its_own(helm: Helm) -> None:
    rendered = helm.template(*BOTH)
    roles = {
        str(at(binding, "roleRef", "name"))
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for binding in rendered.named(kind).values()
        if at(binding, "subjects", 0, "name") == "gpuvirt-scheduler"
    }
    assert roles == {
        "system:kube-scheduler",
        "system:volume-scheduler",
        "extension-apiserver-authentication-reader",
        "gpuvirt-scheduler",
    }
    lease = items(at(rendered.one("Role", "gpuvirt-scheduler"), "rules"))[-1]
    assert at(lease, "resourceNames") == ["gpuvirt-scheduler"]


@pytest.mark.parametrize(
    ("version", "image"),
    [
        ("v1.36.3", "registry.k8s.io/kube-scheduler:v1.36.3"),
        ("v1.34.1+k3s1", "registry.k8s.io/kube-scheduler:v1.34.1"),
        ("v1.33.5-gke.100", "registry.k8s.io/kube-scheduler:v1.33.5"),
    ],
)
def test_the_second_scheduler_has_the_version_of_the_cluster(helm: Helm, version: str, image: str) -> None:
    rendered = helm.template(*BOTH, options=("--kube-version", version))
    assert at(container(rendered, "gpuvirt-scheduler"), "image") == image


def test_the_second_schedulers_image_can_be_chosen(helm: Helm) -> None:
    digest = f"sha256:{'0' * 64}"
    rendered = helm.template(*BOTH, "scheduler.image.repository=example.com/s", f"scheduler.image.tag={digest}")
    assert at(container(rendered, "gpuvirt-scheduler"), "image") == f"example.com/s@{digest}"


def test_the_second_scheduler_reads_the_controllers_configmap(helm: Helm) -> None:
    pod = helm.template(*BOTH).pods()["gpuvirt-scheduler"]
    assert at(pod, "volumes", 0, "configMap") == {"name": "gpuvirt-scheduler"}
    folder = at(pod, "containers", 0, "volumeMounts", 0, "mountPath")
    assert items(at(pod, "containers", 0, "command")) == ["kube-scheduler", f"--config={folder}/config.yaml"]


def test_another_resource_restarts_the_second_scheduler(helm: Helm) -> None:
    def template(*values: str) -> Plain:
        found = helm.template(*BOTH, *values).one("Deployment", "gpuvirt-scheduler")
        return at(found, "spec", "template", "metadata", "annotations")

    assert template() == template("extender.policy=spread")
    assert template() != template("extender.resource=nvidia.com/share")


def test_agents_may_write_the_shares_of_pods_if_the_extender_runs(helm: Helm) -> None:
    rendered = helm.template(*EXTENDER)
    assert rights(rendered, "ClusterRole", "gpuvirt-node-shares") == {
        "pods": ["list", "watch"],
        "pods/status": ["patch"],
        "runtimeclasses": ["list", "watch"],
        "events": ["create"],
    }
    policy = rendered.one("ValidatingAdmissionPolicy", "gpuvirt-node-shares")
    account = f'"system:serviceaccount:{NAMESPACE}:gpuvirt-node"'
    assert account in str(at(policy, "spec", "matchConditions", 0, "expression"))
    assert "gpuvirt-node-shares" not in helm.template().named("ClusterRole")
    old = helm.template(*EXTENDER, options=("--kube-version", "1.31.9"))
    assert "gpuvirt-node-shares" not in old.named("ValidatingAdmissionPolicy")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_pods_for_shares_have_minimal_privileges_and_prefer_different_nodes(helm: Helm, name: str) -> None:
    pod = helm.template(*BOTH, "scheduler.replicas=2").pods()[name]
    assert at(pod, "serviceAccountName") == name
    assert at(pod, "securityContext", "runAsNonRoot") is True
    assert at(pod, "securityContext", "seccompProfile", "type") == "RuntimeDefault"
    assert not any(at(pod, field) for field in ("hostPID", "hostNetwork", "hostIPC"))
    assert at(pod, "affinity", "podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution")
    (only,) = items(at(pod, "containers"))
    may = at(only, "securityContext")
    assert at(may, "capabilities") == {"drop": ["ALL"]}
    assert (at(may, "allowPrivilegeEscalation"), at(may, "readOnlyRootFilesystem")) == (False, True)
    assert at(only, "resources", "requests")
    assert at(only, "resources", "limits", "memory")
    assert at(only, "livenessProbe")
    assert at(only, "readinessProbe")


def test_only_schedulers_may_ask_the_extender(helm: Helm) -> None:
    block = "networkPolicy.schedulersFrom[0].ipBlock.cidr=10.0.0.5/32"
    policies = helm.template(*BOTH, block).named("NetworkPolicy")
    (ingress,) = items(at(policies["gpuvirt-extender"], "spec", "ingress"))
    pods, address = items(at(ingress, "from"))
    assert at(pods, "podSelector", "matchLabels", "app.kubernetes.io/component") == "scheduler"
    assert address == {"ipBlock": {"cidr": "10.0.0.5/32"}}
    (egress,) = items(at(policies["gpuvirt-scheduler"], "spec", "egress"))
    assert at(egress, "to", 0, "podSelector", "matchLabels", "app.kubernetes.io/component") == "extender"
    assert "gpuvirt-scheduler" not in helm.template(*EXTENDER).named("NetworkPolicy")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("scheduler.enabled=true", "scheduler.enabled: the second scheduler asks the extender; set extender.enabled"),
        ("extender.policy=pack", "'/extender/policy': value must be one of 'binpack', 'spread'"),
        ("extender.resource=vgpu", "'/extender/resource': 'vgpu'"),
        ("extender.resource=example.com/vgpu", "'/extender/resource': 'example.com/vgpu'"),
        ("extender.placeTimeoutSeconds=0", "'/extender/placeTimeoutSeconds': minimum: got 0"),
        ("extender.units=0", "'/extender/units': minimum: got 0"),
        ("extender.tls.secretName=A_B", "'/extender/tls/secretName': 'A_B'"),
        ("extender.tls.secret=a", "additional properties 'secret' not allowed"),
        ("extender.enable=true", "additional properties 'enable' not allowed"),
    ],
)
def test_invalid_values_for_shares_are_refused_with_the_path(helm: Helm, value: str, words: str) -> None:
    assert words in helm.refusal(value)


def test_notes_say_how_pods_get_shares(helm: Helm) -> None:
    def notes(*values: str) -> str:
        options = ["install", "x", str(CHART), "--dry-run=client", f"--namespace={NAMESPACE}"]
        done = helm.run(*options, *(f"--set={value}" for value in values))
        assert done.returncode == 0, done.stderr
        return one_line(done.stdout.partition("NOTES:")[2])

    assert "A pod that requests nvidia.com/vgpu: 500 gets half a GPU." in notes(*BOTH)
    assert "It needs schedulerName: gpuvirt-scheduler, too." in notes(*BOTH)
    assert r"-o jsonpath='{.data.extenders\.yaml}'" in notes(*EXTENDER)
    assert "vgpu: 500" not in notes()
    label = "nvidia.com/gpu.workload.config=shared"
    assert "GPUs are shared only with --set sandboxWorkloads.enabled=true." in notes(*BOTH)
    assert label not in notes(*BOTH)
    assert label in notes(*BOTH, "sandboxWorkloads.enabled=true")


def test_the_extender_has_a_certificate_and_the_second_scheduler_its_ca(helm: Helm) -> None:
    rendered = helm.template(*BOTH, "extender.tls.secretName=extender-cert")
    extender, scheduler = (rendered.pods()[name] for name in ("gpuvirt-extender", "gpuvirt-scheduler"))
    options = set(map(str, items(at(extender, "containers", 0, "args"))))
    assert {"--tls-cert=/etc/gpuvirt-extender/tls.crt", "--tls-key=/etc/gpuvirt-extender/tls.key"} <= options
    for pod, files in ((extender, ["tls.crt", "tls.key"]), (scheduler, ["ca.crt"])):
        volume = items(at(pod, "volumes"))[-1]
        assert at(volume, "secret", "secretName") == "extender-cert"
        assert [at(item, "path") for item in items(at(volume, "secret", "items"))] == files
        mount = items(at(pod, "containers", 0, "volumeMounts"))[-1]
        assert (at(mount, "name"), at(mount, "mountPath")) == (at(volume, "name"), "/etc/gpuvirt-extender")
        assert at(mount, "subPath") is None, "the kubelet renews no file of a subPath"
    assert at(rendered.one("Service", "gpuvirt-extender"), "spec", "ports", 0, "name") == "https"


TLS = "extender.tls.secretName=cert"
MUTUAL = (TLS, "extender.tls.clients.caSecretName=clients", "scheduler.tls.secretName=scheduler-cert")


def test_the_extender_asks_for_no_certificates_by_default(helm: Helm) -> None:
    rendered = helm.template(*BOTH, TLS)
    assert "--client" not in str(at(container(rendered, "gpuvirt-extender"), "args"))
    assert at(rendered.one("Service", "gpuvirt-extender"), "metadata", "annotations") is None


@pytest.mark.parametrize("mode", ["optional", "required"])
def test_schedulers_show_certificates_to_the_extender(helm: Helm, mode: str) -> None:
    names = ("extender.tls.clients.names={kube-scheduler,second}", f"extender.tls.clients.certificates={mode}")
    rendered = helm.template(*BOTH, *MUTUAL, *names)
    extender, scheduler = (rendered.pods()[name] for name in ("gpuvirt-extender", "gpuvirt-scheduler"))
    options = [str(item) for item in items(at(extender, "containers", 0, "args")) if str(item).startswith("--client")]
    ca = "--client-ca=/etc/gpuvirt-extender-clients/ca.crt"
    assert options == [ca, f"--client-certs={mode}", "--client-name=kube-scheduler", "--client-name=second"]
    for pod, secret, folder, files in (
        (extender, "clients", "/etc/gpuvirt-extender-clients", ["ca.crt"]),
        (scheduler, "scheduler-cert", "/etc/gpuvirt-scheduler-cert", ["tls.crt", "tls.key"]),
    ):
        volume = items(at(pod, "volumes"))[-1]
        assert at(volume, "secret", "secretName") == secret
        assert [at(item, "path") for item in items(at(volume, "secret", "items"))] == files
        mount = items(at(pod, "containers", 0, "volumeMounts"))[-1]
        assert (at(mount, "name"), at(mount, "mountPath")) == (at(volume, "name"), folder)
        assert at(mount, "subPath") is None, "the kubelet renews no file of a subPath"
    annotations = at(rendered.one("Service", "gpuvirt-extender"), "metadata", "annotations")
    assert annotations == {"gpuvirt.io/client-certificates": mode}


def test_the_second_scheduler_is_restarted_when_it_needs_a_certificate(helm: Helm) -> None:
    def template(*values: str) -> Plain:
        found = helm.template(*BOTH, TLS, *values).one("Deployment", "gpuvirt-scheduler")
        return at(found, "spec", "template", "metadata", "annotations")

    assert template() != template(*MUTUAL) != template(*MUTUAL, "extender.tls.clients.certificates=optional")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            ("extender.tls.clients.caSecretName=a",),
            "clients send certificates only with TLS; set extender.tls.secretName",
        ),
        ((TLS, "extender.tls.clients.names={a}"), "asks for no certificates; set extender.tls.clients.caSecretName"),
        (("scheduler.enabled=true", *MUTUAL[:2]), "needs a certificate of this CA; set scheduler.tls.secretName, too"),
        (("extender.tls.clients.certificates=on",), "value must be one of 'optional', 'required'"),
        (("extender.tls.clients.names={a b}",), "'/extender/tls/clients/names/0': 'a b'"),
    ],
)
def test_contradictions_about_certificates_are_refused(helm: Helm, values: tuple[str, ...], words: str) -> None:
    assert words in helm.refusal("extender.enabled=true", *values)


def test_another_certificate_restarts_the_second_scheduler(helm: Helm) -> None:
    def template(*values: str) -> Plain:
        found = helm.template(*BOTH, *values).one("Deployment", "gpuvirt-scheduler")
        return at(found, "spec", "template")

    assert template() != template("extender.tls.secretName=a") != template("extender.tls.secretName=b")
