"""The chart's objects of the admission webhook."""

import base64

import pytest
import yaml

from gpuvirt.plain import Plain
from gpuvirt.webhook.injectionconfig import InjectionProfile, parse
from tests.deploy.chart.helmchart import NAMESPACE, Helm, Rendered, at, items

pytestmark = [pytest.mark.ring("helm"), pytest.mark.xdist_group("helm")]

NAME = "gpuvirt-webhook"
ON = ("webhook.enabled=true", "webhook.config.classes.kata-gpu.profile=hot-plug")
OWN = ("webhook.tls.secretName=cert", "webhook.tls.caBundle=-----BEGIN CERTIFICATE-----x")
OLD = ("--kube-version", "1.29.9")
"""A cluster without such policies."""
MANAGED = "webhook.tls.certManager.enabled=true"


def entry(rendered: Rendered) -> Plain:
    """Return the only webhook of the configuration."""
    (found,) = items(at(rendered.one("MutatingWebhookConfiguration", NAME), "webhooks"))
    return found


def config(rendered: Rendered) -> str:
    return str(at(rendered.one("ConfigMap", NAME), "data", "config.yaml"))


def test_there_is_no_webhook_by_default(helm: Helm) -> None:
    assert not [manifest for manifest in helm.template().manifests if at(manifest, "metadata", "name") == NAME]


def test_only_new_pods_of_its_runtime_classes_need_the_webhook(helm: Helm) -> None:
    found = entry(helm.template(*ON, "webhook.config.classes.kata-b.profile=cold-plug"))
    (condition,) = items(at(found, "matchConditions"))
    expected = 'has(object.spec.runtimeClassName) && object.spec.runtimeClassName in ["kata-b","kata-gpu"]'
    assert at(condition, "expression") == expected
    assert (at(found, "failurePolicy"), at(found, "sideEffects")) == ("Fail", "None")
    assert (at(found, "reinvocationPolicy"), at(found, "timeoutSeconds")) == ("IfNeeded", 5)
    (rule,) = items(at(found, "rules"))
    assert (at(rule, "operations"), at(rule, "resources")) == (["CREATE"], ["pods"])
    assert at(found, "admissionReviewVersions") == ["v1"]
    service = {"name": NAME, "namespace": NAMESPACE, "path": "/mutate", "port": 443}
    assert at(found, "clientConfig") == {"service": service}


def test_pods_with_units_of_labelled_namespaces_need_the_webhook_where_a_second_scheduler_runs(helm: Helm) -> None:
    on = ("webhook.enabled=true", "extender.enabled=true", "scheduler.enabled=true")
    shares = (*on, "extender.resource=nvidia.com/x")
    rendered = helm.template(*shares)
    found = entry(rendered)
    assert (at(found, "name"), at(found, "failurePolicy")) == ("shares.gpuvirt.io", "Fail")
    assert at(found, "namespaceSelector") == {"matchLabels": {"gpuvirt.io/scheduler": "gpuvirt-scheduler"}}
    _, units = items(at(found, "matchConditions"))
    assert "'nvidia.com/x' in c.resources.limits" in str(at(units, "expression"))
    assert parse(config(rendered), where="config.yaml").units == "nvidia.com/x"
    assert NAME not in rendered.named("ValidatingAdmissionPolicy")
    both = items(at(helm.template(*ON, *shares).one("MutatingWebhookConfiguration", NAME), "webhooks"))
    assert [at(each, "name") for each in both] == ["kata.gpuvirt.io", "shares.gpuvirt.io"]


def test_the_webhook_reads_the_config_of_the_values(helm: Helm) -> None:
    driver = "webhook.config.classes.kata-gpu.driver=/opt/driver"
    types = "webhook.config.vgpuResources={example.com/v-*}"
    parsed = parse(config(helm.template(*ON, driver, types, "extender.resource=nvidia.com/share")), where="config.yaml")
    assert parsed.classes["kata-gpu"].profile is InjectionProfile.HOT_PLUG
    assert parsed.classes["kata-gpu"].driver == "/opt/driver"
    assert (parsed.vgpus, parsed.units) == (("example.com/v-*",), "nvidia.com/share")
    assert parse(config(helm.template(*ON)), where="config.yaml").is_vgpu("tencent.com/vgpu-492")


def test_the_webhook_has_minimal_privileges_and_no_rights(helm: Helm) -> None:
    rendered = helm.template(*ON)
    pod = rendered.pods()[NAME]
    assert (at(pod, "serviceAccountName"), at(pod, "automountServiceAccountToken")) == (NAME, False)
    assert at(pod, "securityContext", "runAsNonRoot") is True
    assert at(pod, "securityContext", "seccompProfile", "type") == "RuntimeDefault"
    (only,) = items(at(pod, "containers"))
    may = at(only, "securityContext")
    assert at(may, "capabilities") == {"drop": ["ALL"]}
    assert (at(may, "allowPrivilegeEscalation"), at(may, "readOnlyRootFilesystem")) == (False, True)
    assert at(only, "resources", "limits", "memory")
    bound = [
        subject
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for binding in rendered.named(kind).values()
        for subject in items(at(binding, "subjects"))
        if at(subject, "name") == NAME
    ]
    assert bound == []


def test_two_replicas_serve_on_different_nodes_and_one_is_always_there(helm: Helm) -> None:
    rendered = helm.template(*ON)
    spec = at(rendered.one("Deployment", NAME), "spec")
    assert at(spec, "replicas") == 2
    assert at(spec, "strategy", "rollingUpdate") == {"maxSurge": 1, "maxUnavailable": 0}
    assert at(rendered.pods()[NAME], "affinity", "podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution")
    assert at(rendered.one("PodDisruptionBudget", NAME), "spec", "maxUnavailable") == 1
    assert NAME not in helm.template(*ON, "webhook.replicas=1").named("PodDisruptionBudget")
    service = at(rendered.one("Service", NAME), "spec")
    assert at(service, "selector") == at(spec, "selector", "matchLabels")
    assert [at(port, "port") for port in items(at(service, "ports"))] == [443, 8444]


def test_the_api_server_and_prometheus_may_connect(helm: Helm) -> None:
    policies = helm.template(*ON).named("NetworkPolicy")
    (ingress,) = items(at(policies[NAME], "spec", "ingress"))
    assert ingress == {"ports": [{"protocol": "TCP", "port": 8443}]}
    (metrics,) = items(at(policies[f"{NAME}-metrics"], "spec", "ingress"))
    assert at(metrics, "ports", 0, "port") == 8444


def test_the_certificate_is_a_given_secret_with_its_ca(helm: Helm) -> None:
    rendered = helm.template(*ON, *OWN)
    volume = items(at(rendered.pods()[NAME], "volumes"))[-1]
    assert at(volume, "secret", "secretName") == "cert"
    mount = items(at(rendered.pods()[NAME], "containers", 0, "volumeMounts"))[-1]
    assert at(mount, "subPath") is None, "the kubelet renews no file of a subPath"
    bundle = str(at(entry(rendered), "clientConfig", "caBundle"))
    assert base64.b64decode(bundle) == b"-----BEGIN CERTIFICATE-----x"


def test_pods_of_its_classes_have_no_other_rights_where_pod_security_is_enforced(helm: Helm) -> None:
    classes = ("kata-b.profile=cold-plug", "kata-c.profile=cold-plug", "kata-c.driver=/opt/c")
    rendered = helm.template(*ON, *(f"webhook.config.classes.{value}" for value in classes))
    policy = rendered.one("ValidatingAdmissionPolicy", NAME)
    (condition,) = items(at(policy, "spec", "matchConditions"))
    assert at(condition, "expression") == at(entry(rendered), "matchConditions", 0, "expression")
    trees = '{"kata-c":"/opt/c","kata-gpu":"/opt/guest-driver"}'
    assert at(policy, "spec", "variables", 0, "expression") == trees
    binding = rendered.one("ValidatingAdmissionPolicyBinding", NAME)
    (label,) = items(at(binding, "spec", "matchResources", "namespaceSelector", "matchExpressions"))
    assert at(label, "values") == ["baseline", "restricted"]
    for off in (helm.template(*ON, "webhook.podSecurity.enabled=false"), helm.template(*ON, options=OLD)):
        assert NAME not in off.named("ValidatingAdmissionPolicy")


@pytest.mark.parametrize(("values", "issuer"), [((), NAME), (("webhook.tls.certManager.issuer.name=own",), "own")])
def test_cert_manager_issues_the_certificate(helm: Helm, values: tuple[str, ...], issuer: str) -> None:
    rendered = helm.template(*ON, MANAGED, *values)
    spec = at(rendered.one("Certificate", NAME), "spec")
    assert at(spec, "dnsNames") == [f"{NAME}.{NAMESPACE}.svc"]
    assert at(spec, "issuerRef") == {"name": issuer, "kind": "Issuer", "group": "cert-manager.io"}
    volume = items(at(rendered.pods()[NAME], "volumes"))[-1]
    assert at(volume, "secret", "secretName") == at(spec, "secretName")
    annotations = at(rendered.one("MutatingWebhookConfiguration", NAME), "metadata", "annotations")
    assert annotations == {"cert-manager.io/inject-ca-from": f"{NAMESPACE}/{NAME}"}
    assert (NAME in rendered.named("Issuer")) == (issuer == NAME)


def test_the_controller_keeps_the_certificate_unless_another_program_does(helm: Helm) -> None:
    def rights(rendered: Rendered, kind: str) -> list[Plain]:
        rules = items(at(rendered.one(kind, "gpuvirt-controller"), "rules"))
        named = {"secrets", "mutatingwebhookconfigurations"}
        return [rule for rule in rules if named & set(map(str, items(at(rule, "resources"))))]

    kept = helm.template(*ON)
    assert "--webhook=gpuvirt-webhook" in items(at(kept.pods()["gpuvirt-controller"], "containers", 0, "args"))
    (configurations,) = rights(kept, "ClusterRole")
    assert (at(configurations, "resourceNames"), at(configurations, "verbs")) == ([NAME], ["get", "patch"])
    create, change = rights(kept, "Role")
    assert at(create, "verbs") == ["create"]
    assert (at(change, "resourceNames"), at(change, "verbs")) == ([f"{NAME}-cert"], ["get", "patch"])
    for values in ((), (*ON, MANAGED), (*ON, *OWN)):
        rendered = helm.template(*values)
        assert "--webhook" not in str(at(rendered.pods()["gpuvirt-controller"], "containers", 0, "args"))
        assert not rights(rendered, "ClusterRole") + rights(rendered, "Role")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("webhook.enabled=true",), "it has no RuntimeClass; set webhook.config.classes"),
        ((*ON, OWN[0]), "the API server needs the CA of this certificate; set webhook.tls.caBundle, too"),
        ((*ON, OWN[1]), "it belongs to a certificate of your own; set webhook.tls.secretName, too"),
        ((*ON, *OWN, MANAGED), "cert-manager writes a Secret of its own; leave it out"),
        ((*ON, "webhook.timeoutSeconds=30"), "'/webhook/timeoutSeconds': maximum: got 30, want 10"),
        ((*ON, "webhook.config.classes.kata-gpu.profile=hot"), "value must be one of 'hot-plug', 'cold-plug'"),
        ((*ON, "webhook.config.classes.kata-gpu.drivr=/x"), "additional properties 'drivr' not allowed"),
        ((*ON, "webhook.config.classes.kata-gpu.driver=x"), "'/webhook/config/classes/kata-gpu/driver': 'x'"),
        ((*ON, "webhook.config.vgpuResources={a}"), "'/webhook/config/vgpuResources/0': 'a'"),
        ((*ON, "webhook.tls.caBundle=x"), "'/webhook/tls/caBundle': 'x'"),
    ],
)
def test_contradictions_are_refused(helm: Helm, values: tuple[str, ...], words: str) -> None:
    assert words in helm.refusal(*values)


def test_the_config_has_every_key_of_a_class(helm: Helm) -> None:
    values = [
        f"webhook.config.classes.kata-gpu.{value}"
        for value in (
            "profile=cold-plug",
            "driver=null",
            "mdev=allow",
            "nvidia.image=a",
            "nvidia.imagePullPolicy=Always",
            "nvidia.command={a,b}",
            "nvidia.capabilities={MKNOD}",
            "gridd.resources.limits.cpu=1",
            "containers.dev=true",
            "containers.path=/bin",
            "licenceSecret=s",
        )
    ]
    text = config(helm.template("webhook.enabled=true", *values))
    assert yaml.safe_load(text)["version"] == "v1"
    found = parse(text, where="config.yaml").classes["kata-gpu"]
    assert found.nvidia is not None
    assert (found.nvidia.image, found.nvidia.command, found.licence_secret) == ("a", ("a", "b"), "s")
