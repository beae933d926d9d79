"""Decisions about the ConfigMap with the scheduler's configuration: apply it, delete it, or say why it can't be made.

The extender's Service owns the ConfigMap: Kubernetes deletes the ConfigMap after the Service, and so after the release.
"""

from dataclasses import dataclass

from gpuvirt.cluster.kinds import workloads
from gpuvirt.cluster.kinds.core import Service
from gpuvirt.cluster.kinds.manifests import ObjectMeta, OwnerReference
from gpuvirt.cluster.kinds.workloads import ConfigMap
from gpuvirt.cluster.objects import ObjectKey
from gpuvirt.cluster.operator.deployment.decisions import Existing
from gpuvirt.cluster.operator.deployment.drift import DIGEST_ANNOTATION, StoredObject, is_due, signed
from gpuvirt.cluster.operator.scheduler.configuration import (
    OF_EXISTING,
    OF_SECOND,
    SCHEDULER,
    extender,
    for_existing_scheduler,
    for_second_scheduler,
    tls_of,
    url_of,
)
from gpuvirt.cluster.operator.settings import SharedResource
from gpuvirt.cluster.operator.store import Objects
from gpuvirt.cluster.operator.writes import ApplyObject, DeleteObject, Target
from gpuvirt.cluster.resources import config_maps

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


@dataclass(frozen=True, slots=True)
class SchedulerDecisions:
    """The writes for the scheduler's configuration, and why it can't be written."""

    writes: tuple[ApplyObject | DeleteObject, ...] = ()
    faults: tuple[str, ...] = ()


def decide(
    shared: SharedResource | None, services: Objects[Service], existing: Existing, namespace: str
) -> SchedulerDecisions:
    """Return the decisions; without a shared resource no scheduler needs a configuration."""
    target = Target(config_maps(namespace), CONFIG_MAP)
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


def _deletions(target: Target, stored: StoredObject | None) -> tuple[DeleteObject, ...]:
    """Return the deletion of a ConfigMap that the controller has applied; one of an admin's own stays."""
    if stored is None or DIGEST_ANNOTATION not in stored.metadata.annotations or stored.metadata.deletion_timestamp:
        return ()
    return (DeleteObject(target, stored.metadata.uid, "fractional sharing is switched off"),)


def _fault(why: str, fix: str) -> str:
    return f"ConfigMap {CONFIG_MAP}: {why}; {fix}"
