"""The scheduler's configuration among the controller's decisions: when it is written, deleted, or reported."""

import msgspec
import pytest
from msgspec.structs import replace

from gpuvirt.controller.decisions import Decisions
from gpuvirt.controller.deployment import Existing, StoredObject
from gpuvirt.controller.scheduler import CONFIG_KEY, CONFIG_MAP, EXTENDER, EXTENDERS_KEY, url_of
from gpuvirt.controller.settings import SharedResource
from gpuvirt.controller.writes import ApplyObject, DeleteObject
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.kinds.core import Service, ServicePort, ServiceSpec
from gpuvirt.kube.kinds.workloads import ConfigMap
from gpuvirt.kube.objects import key_of
from gpuvirt.kube.resources import Metadata, config_maps
from gpuvirt.model.shares.sharedgpus import SCHEDULER
from gpuvirt.plain import Plain, read
from tests.controller.observedcluster import SETTINGS, ObservedCluster, node, policy
from tests.deploy.chart.helmchart import at, items

SHARES = replace(SETTINGS, shared=SharedResource(ResourceName("nvidia.com/vgpu")))


def service(address: str = "10.96.7.8", *, port: int = 8888, name: str = "http", clients: str = "") -> Service:
    """Return the extender's Service as the API server has it."""
    annotations = {"gpuvirt.io/client-certificates": clients} if clients else {}
    metadata = Metadata(EXTENDER, SETTINGS.namespace, "uid-of-the-service", annotations=annotations)
    return Service(metadata, ServiceSpec(address, (ServicePort(port, name),)))


def written(decisions: Decisions) -> ConfigMap | None:
    """Return the ConfigMap that was applied."""
    found = (
        write.content
        for write in decisions.writes
        if isinstance(write, ApplyObject) and write.target.name == CONFIG_MAP
    )
    manifest = next(found, None)
    assert manifest is None or isinstance(manifest, ConfigMap)
    return manifest


def as_stored(manifest: ConfigMap) -> ObservedCluster:
    """Return a cluster that has the ConfigMap and the Service."""
    item = msgspec.json.decode(msgspec.json.encode(manifest), type=StoredObject)
    stored = {config_maps(SETTINGS.namespace): {key_of(item): item}}
    return ObservedCluster(services=[service()], existing=Existing(stored))


def content(manifest: ConfigMap | None, key: str) -> Plain:
    assert manifest is not None
    return read(manifest.data[key], where=key).content


def test_the_configuration_names_the_extender_by_its_address() -> None:
    manifest = written(ObservedCluster(services=[service()]).decided(SHARES))
    entry = {
        "urlPrefix": "http://10.96.7.8:8888",
        "managedResources": [{"name": "nvidia.com/vgpu", "ignoredByScheduler": False}],
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "weight": 5,
        "nodeCacheCapable": True,
        "ignorable": False,
        "httpTimeout": "5s",
    }
    assert content(manifest, CONFIG_KEY) == {
        "leaderElection": {
            "resourceNamespace": SETTINGS.namespace,
            "leaderElect": True,
            "resourceName": "gpuvirt-scheduler",
        },
        "extenders": [entry],
        "profiles": [{"schedulerName": SCHEDULER}],
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
    }
    assert content(manifest, EXTENDERS_KEY) == {"extenders": [entry]}


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert url_of(service("fd00:10:96::8")) == "http://[fd00:10:96::8]:8888"


def test_a_service_with_a_port_for_https_is_asked_with_a_certificate_that_is_checked() -> None:
    """By its name, since the URL has an address, and with a CA, without which kube-scheduler accepts any."""
    manifest = written(ObservedCluster(services=[service(name="https")]).decided(SHARES))
    name = f"gpuvirt-extender.{SETTINGS.namespace}.svc"
    for key, ca_file in (
        (CONFIG_KEY, "/etc/gpuvirt-extender/ca.crt"),
        (EXTENDERS_KEY, "/etc/kubernetes/gpuvirt-extender-ca.crt"),
    ):
        (entry,) = items(at(content(manifest, key), "extenders"))
        assert at(entry, "urlPrefix") == "https://10.96.7.8:8888"
        assert at(entry, "enableHTTPS") is True
        assert at(entry, "tlsConfig") == {"caFile": ca_file, "serverName": name}


@pytest.mark.parametrize("mode", ["optional", "required"])
def test_a_scheduler_shows_its_certificate_where_the_extender_asks_for_one(mode: str) -> None:
    """By files: a key in the ConfigMap could be read by all who may read ConfigMaps."""
    manifest = written(ObservedCluster(services=[service(name="https", clients=mode)]).decided(SHARES))
    for key, files in (
        (CONFIG_KEY, ("/etc/gpuvirt-scheduler-cert/tls.crt", "/etc/gpuvirt-scheduler-cert/tls.key")),
        (
            EXTENDERS_KEY,
            ("/etc/kubernetes/gpuvirt-extender-client.crt", "/etc/kubernetes/gpuvirt-extender-client.key"),
        ),
    ):
        (entry,) = items(at(content(manifest, key), "extenders"))
        tls = at(entry, "tlsConfig")
        assert (at(tls, "certFile"), at(tls, "keyFile")) == files
        assert "Data" not in str(tls)


def test_without_tls_no_certificate_is_named() -> None:
    manifest = written(ObservedCluster(services=[service(clients="required")]).decided(SHARES))
    assert "tlsConfig" not in str(manifest)


def test_the_extenders_service_owns_the_configuration() -> None:
    manifest = written(ObservedCluster(services=[service()]).decided(SHARES))
    assert manifest is not None
    (owner,) = manifest.metadata.owner_references
    assert (owner.kind, owner.name, owner.uid) == ("Service", EXTENDER, "uid-of-the-service")


def test_a_written_configuration_is_written_again_only_after_a_change() -> None:
    manifest = written(ObservedCluster(services=[service()]).decided(SHARES))
    assert manifest is not None
    found = as_stored(manifest)
    assert written(found.decided(SHARES)) is None
    moved = written(replace(found, services=[service("10.96.7.9")]).decided(SHARES))
    assert moved is not None
    assert "http://10.96.7.9:8888" in moved.data[CONFIG_KEY]
    edited = msgspec.structs.replace(manifest, data={CONFIG_KEY: "{}"})
    assert written(as_stored(edited).decided(SHARES)) is not None


def test_the_configuration_needs_no_clusterpolicy() -> None:
    assert written(ObservedCluster(policies=[], services=[service()]).decided(SHARES)) is not None


def test_an_invalid_clusterpolicy_does_not_stop_the_scheduler() -> None:
    bad = policy({"sandboxWorkloads": {"enabled": True, "mode": "xen"}})
    assert written(ObservedCluster([node("vm-vgpu")], [bad], services=[service()]).decided(SHARES)) is not None


def test_no_configuration_is_written_without_a_shared_resource() -> None:
    assert written(ObservedCluster(services=[service()]).decided(SETTINGS)) is None


def test_the_controllers_configuration_is_deleted_once_nothing_is_shared() -> None:
    manifest = written(ObservedCluster(services=[service()]).decided(SHARES))
    assert manifest is not None
    (deletion,) = [write for write in as_stored(manifest).decided(SETTINGS).writes if isinstance(write, DeleteObject)]
    assert deletion.target.name == CONFIG_MAP
    own = msgspec.structs.replace(manifest, metadata=msgspec.structs.replace(manifest.metadata, annotations={}))
    kept = as_stored(own).decided(SETTINGS).writes
    assert not [write for write in kept if isinstance(write, DeleteObject)], "an admin's own ConfigMap stays"


@pytest.mark.parametrize(
    ("services", "says"),
    [
        ([], "the Service gpuvirt-extender, whose address it needs, is not in namespace gpu-operator"),
        ([service("")], "expected a cluster IP, found cluster IP unset, 1 ports"),
        ([service("None")], "expected a cluster IP, found cluster IP None, 1 ports"),
    ],
)
def test_a_service_without_an_address_is_reported_and_what_exists_stays(services: list[Service], says: str) -> None:
    manifest = written(ObservedCluster(services=[service()]).decided(SHARES))
    assert manifest is not None
    decided = replace(as_stored(manifest), services=services).decided(SHARES)
    assert written(decided) is None
    assert not [write for write in decided.writes if isinstance(write, DeleteObject)]
    assert any(says in operand for operand in decided.progress.operands)
