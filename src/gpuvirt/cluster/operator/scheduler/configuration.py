"""The KubeSchedulerConfiguration that names gpuvirt's extender, as text for kube-scheduler's `--config`.

Source: Kubernetes' API reference, kubescheduler.config.k8s.io/v1. Its decoder is strict: it refuses unknown fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from gpuvirt import plain
from gpuvirt.cluster.kinds.core import Service
from gpuvirt.facts.ids import ResourceName

SCHEDULER = "gpuvirt-scheduler"
"""The name that pods give as their `schedulerName`, and the Lease by which second schedulers elect a leader."""
WEIGHT = 5
"""How much the extender's scores count: more than each plugin of kube-scheduler, so that shares are packed."""
TIMEOUT = "5s"
"""How long kube-scheduler waits for an answer."""
HTTPS = "https"
"""The name of the Service's port where the extender has a certificate."""
CLIENT_CERTIFICATES = "gpuvirt.io/client-certificates"
"""The annotation of a Service whose extender asks its clients for certificates: `optional` or `required`."""
HEADER = "# gpuvirt's controller writes this configuration, and undoes edits.\n"


@dataclass(frozen=True, slots=True)
class TlsFiles:
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


class Extender(msgspec.Struct, frozen=True, rename="camel"):
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


class Profile(msgspec.Struct, frozen=True, rename="camel"):
    """The pods that a scheduler is for, by their `schedulerName`."""

    scheduler_name: str = SCHEDULER


class Extenders(msgspec.Struct, frozen=True, rename="camel"):
    """The part that the configuration of any kube-scheduler can have."""

    extenders: tuple[Extender, ...]


class Configuration(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """The configuration of a second kube-scheduler."""

    api_version: str = "kubescheduler.config.k8s.io/v1"
    kind: str = "KubeSchedulerConfiguration"
    leader_election: LeaderElection
    profiles: tuple[Profile, ...] = (Profile(),)
    extenders: tuple[Extender, ...]


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


def extender(url: str, resources: Sequence[ResourceName], tls: Tls | None = None) -> Extender:
    """Return the entry of the extender at a URL, for the pods that request any of these resources."""
    managed = tuple(map(ManagedResource, sorted(set(resources))))
    return Extender(url, managed) if tls is None else Extender(url, managed, enable_https=True, tls_config=tls)


def for_second_scheduler(entry: Extender, namespace: str) -> str:
    """Return the whole configuration of a kube-scheduler beside the cluster's own."""
    return _text(Configuration(leader_election=LeaderElection(namespace), extenders=(entry,)))


def for_existing_scheduler(entry: Extender) -> str:
    """Return the lines to add to the configuration of the cluster's own kube-scheduler."""
    return _text(Extenders((entry,)))


def _text(configuration: Configuration | Extenders) -> str:
    return HEADER + plain.write(msgspec.to_builtins(configuration))
