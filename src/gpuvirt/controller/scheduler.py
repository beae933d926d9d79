"""Decisions about the ConfigMap with the scheduler's configuration: apply it, delete it, or say why it can't be made.

The configuration is a KubeSchedulerConfiguration that names gpuvirt's extender, as text for kube-scheduler's option
`--config`. Source: Kubernetes' API reference, kubescheduler.config.k8s.io/v1. Its decoder is strict: it refuses unknown
fields. The extender's Service owns the ConfigMap: Kubernetes deletes the ConfigMap after the Service, and so after the
release.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from gpuvirt import plain
from gpuvirt.controller.deployment import DIGEST_ANNOTATION, Existing, StoredObject, is_due, signed
from gpuvirt.controller.settings import SharedResource
from gpuvirt.controller.store import Objects
from gpuvirt.controller.writes import ApplyObject, DeleteObject, WriteTarget
from gpuvirt.facts.ids import ResourceName
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.core import Service
from gpuvirt.kube.kinds.parts import ObjectMeta, OwnerReference
from gpuvirt.kube.kinds.workloads import ConfigMap
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import config_maps
from gpuvirt.model.shares.sharedgpus import SCHEDULER

WEIGHT = 5
"""How much the extender's scores count: more than each plugin of kube-scheduler, so that shares are packed."""
TIMEOUT = "5s"
"""How long kube-scheduler waits for an answer."""
HTTPS = "https"
"""The name of the Service's port where the extender has a certificate."""
CLIENT_CERTIFICATES = "gpuvirt.io/client-certificates"
"""The annotation of a Service whose extender asks its clients for certificates: `optional` or `required`."""
HEADER = "# gpuvirt's controller writes this configuration, and undoes edits.\n"
CONFIG_MAP = SCHEDULER
EXTENDER = "gpuvirt-extender"
"""The Service of the extender."""
CONFIG_KEY = "config.yaml"
"""The entry for a second kube-scheduler."""
EXTENDERS_KEY = "extenders.yaml"
"""The entry for the cluster's own kube-scheduler."""
LABELS = {
    "app.kubernetes.io/name": "gpuvirt",
    "app.kubernetes.io/component": "scheduler",
    "app.kubernetes.io/part-of": "gpuvirt",
    "app.kubernetes.io/managed-by": "gpuvirt",
}


class TlsFiles(msgspec.Struct, frozen=True):
    """The files of a kube-scheduler for TLS."""

    authority: str
    certificate: str
    key: str


OF_SECOND = TlsFiles(
    "/etc/gpuvirt-extender/ca.crt", "/etc/gpuvirt-scheduler-cert/tls.crt", "/etc/gpuvirt-scheduler-cert/tls.key"
)
"""Where the chart mounts them into the second scheduler."""
OF_EXISTING = TlsFiles(
    "/etc/kubernetes/gpuvirt-extender-ca.crt",
    "/etc/kubernetes/gpuvirt-extender-client.crt",
    "/etc/kubernetes/gpuvirt-extender-client.key",
)
"""Where an admin puts them for the cluster's own. A key is never in the configuration: a ConfigMap is no secret."""


class ManagedResource(msgspec.Struct, frozen=True, rename="camel"):
    """A resource for whose pods kube-scheduler asks the extender."""

    name: ResourceName
    ignored_by_scheduler: bool = False
    """False: kube-scheduler itself leaves out nodes without enough units, and finds the victims of a preemption."""


class Tls(msgspec.Struct, frozen=True, rename="camel"):
    """How kube-scheduler checks the extender's certificate. Without a CA it would accept any."""

    ca_file: str
    """The CA that has signed the certificate. kube-scheduler reads the file when it starts."""
    server_name: str
    """The name in the certificate, since the URL has an address."""
    cert_file: str | UnsetType = UNSET
    """The certificate by which kube-scheduler proves who it is. It reads both files again when they change."""
    key_file: str | UnsetType = UNSET


class ExtenderEntry(msgspec.Struct, frozen=True, rename="camel"):
    """How kube-scheduler asks the extender."""

    url_prefix: str
    managed_resources: tuple[ManagedResource, ...]
    filter_verb: str = "filter"
    prioritize_verb: str = "prioritize"
    preempt_verb: str = "preempt"
    bind_verb: str = "bind"
    weight: int = WEIGHT
    node_cache_capable: bool = True
    """The extender knows the nodes, so that requests have only their names."""
    ignorable: bool = False
    """While the extender does not answer, pods with shares wait; otherwise two of them could get the same units."""
    http_timeout: str = TIMEOUT
    enable_https: bool | UnsetType = msgspec.field(name="enableHTTPS", default=UNSET)
    tls_config: Tls | UnsetType = UNSET


class LeaderElection(msgspec.Struct, frozen=True, rename="camel"):
    """The Lease by which several second schedulers elect a leader."""

    resource_namespace: str
    leader_elect: bool = True
    resource_name: str = SCHEDULER


class SchedulerProfile(msgspec.Struct, frozen=True, rename="camel"):
    """The pods that a scheduler is for, by their `schedulerName`."""

    scheduler_name: str = SCHEDULER


class Extenders(msgspec.Struct, frozen=True, rename="camel"):
    """The part that the configuration of any kube-scheduler can have."""

    extenders: tuple[ExtenderEntry, ...]


class SchedulerConfiguration(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The configuration of a second kube-scheduler."""

    api_version: str = "kubescheduler.config.k8s.io/v1"
    kind: str = "KubeSchedulerConfiguration"
    leader_election: LeaderElection
    profiles: tuple[SchedulerProfile, ...] = (SchedulerProfile(),)
    extenders: tuple[ExtenderEntry, ...]


def url_of(service: Service) -> str | None:
    """Return the extender's URL by its Service's address; None if the Service has no address or no port.

    It names no host: a kube-scheduler in a static pod uses its node's DNS, which does not know the cluster's Services.
    """
    address, port = service.spec.cluster_ip, next(iter(service.spec.ports), None)
    if not address or address == "None" or port is None:
        return None
    scheme = "https" if port.name == HTTPS else "http"
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port.port}"


def tls_of(service: Service, files: TlsFiles) -> Tls | None:
    """Return how the two certificates are checked; None where the Service's port is not for HTTPS."""
    port, metadata = next(iter(service.spec.ports), None), service.metadata
    if port is None or port.name != HTTPS:
        return None
    server_name = f"{metadata.name}.{metadata.namespace}.svc"
    if not metadata.annotations.get(CLIENT_CERTIFICATES):
        return Tls(files.authority, server_name)
    return Tls(files.authority, server_name, files.certificate, files.key)


def extender(url: str, resources: Sequence[ResourceName], tls: Tls | None = None) -> ExtenderEntry:
    """Return the entry of the extender at a URL, for the pods that request any of these resources."""
    managed = tuple(map(ManagedResource, sorted(set(resources))))
    return (
        ExtenderEntry(url, managed) if tls is None else ExtenderEntry(url, managed, enable_https=True, tls_config=tls)
    )


def for_second_scheduler(entry: ExtenderEntry, namespace: str) -> str:
    """Return the whole configuration of a kube-scheduler beside the cluster's own."""
    return _text(SchedulerConfiguration(leader_election=LeaderElection(namespace), extenders=(entry,)))


def for_existing_scheduler(entry: ExtenderEntry) -> str:
    """Return the lines to add to the configuration of the cluster's own kube-scheduler."""
    return _text(Extenders((entry,)))


def _text(configuration: SchedulerConfiguration | Extenders) -> str:
    return HEADER + plain.write(msgspec.to_builtins(configuration))


class SchedulerDecisions(msgspec.Struct, frozen=True):
    """The writes for the scheduler's configuration, and why it can't be written."""

    writes: tuple[ApplyObject | DeleteObject, ...] = ()
    faults: tuple[str, ...] = ()


def decide(
    shared: SharedResource | None, services: Objects[Service], existing: Existing, namespace: str
) -> SchedulerDecisions:
    """Return the decisions; without a shared resource no scheduler needs a configuration."""
    target = WriteTarget(config_maps(namespace), CONFIG_MAP)
    stored = existing.stored.get(target.resource, {}).get(ObjectKey(namespace, CONFIG_MAP))
    if shared is None:
        return SchedulerDecisions(_deletions(target, stored))
    service = services.get(ObjectKey(namespace, EXTENDER))
    if service is None or service.metadata.deletion_timestamp:
        why = f"the Service {EXTENDER}, whose address it needs, is not in namespace {namespace}"
        return SchedulerDecisions(faults=(_fault(why, "set extender.enabled=true in the chart's values"),))
    url = url_of(service)
    if url is None:
        found = f"cluster IP {service.spec.cluster_ip or 'unset'}, {len(service.spec.ports)} ports"
        why = f"the Service {EXTENDER} in namespace {namespace} has no address; expected a cluster IP, found {found}"
        return SchedulerDecisions(faults=(_fault(why, "delete the Service, and upgrade the release"),))
    manifest = _config_map(url, shared, service, namespace)
    due = is_due(manifest, stored, existing.marks.get(target))
    return SchedulerDecisions((ApplyObject(target, signed(manifest)),) if due else ())


def _config_map(url: str, shared: SharedResource, service: Service, namespace: str) -> ConfigMap:
    second, existing = (extender(url, (shared.name,), tls_of(service, files)) for files in (OF_SECOND, OF_EXISTING))
    owner = OwnerReference(api_version=workloads.CORE, kind="Service", name=EXTENDER, uid=service.metadata.uid)
    metadata = ObjectMeta(name=CONFIG_MAP, namespace=namespace, labels=LABELS, owner_references=(owner,))
    data = {CONFIG_KEY: for_second_scheduler(second, namespace), EXTENDERS_KEY: for_existing_scheduler(existing)}
    return ConfigMap(api_version=workloads.CORE, metadata=metadata, data=data)


def _deletions(target: WriteTarget, stored: StoredObject | None) -> tuple[DeleteObject, ...]:
    """Return the deletion of a ConfigMap that the controller has applied; one of an admin's own stays."""
    if stored is None or DIGEST_ANNOTATION not in stored.metadata.annotations or stored.metadata.deletion_timestamp:
        return ()
    return (DeleteObject(target, stored.metadata.uid, "fractional sharing is switched off"),)


def _fault(why: str, fix: str) -> str:
    return f"ConfigMap {CONFIG_MAP}: {why}; {fix}"
