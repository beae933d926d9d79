"""Reads the claims (DRA) that have, or may get, GPUs of gpuvirt's nodes: `gpuvirt claims`."""

import asyncio
from collections import defaultdict

from msgspec.structs import replace

from gpuvirt.diagnosis.clusterreading import NOT_PREPARED
from gpuvirt.diagnosis.vms.podclaims import ClaimSeen, claim_seen, claimers
from gpuvirt.diagnosis.vms.vmfindings import refusal_in
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import Namespace
from gpuvirt.kube.client import Client
from gpuvirt.kube.events import EVENTS, SeenEvent, newest
from gpuvirt.kube.failures import NotFoundError
from gpuvirt.kube.kinds.core import WholePod
from gpuvirt.kube.kinds.resourceclaims import ALL_CLAIMS, DEVICE_CLASSES, WholeClaim
from gpuvirt.kube.resources import Collection, Resource
from gpuvirt.model.allocation.claims import DRIVER


async def read_claims(client: Client, namespace: Namespace | None, selector: str = "") -> tuple[ClaimSeen, ...]:
    """Return the claims of a namespace, None: of all; raises ApiError, and ConfigError for a cluster without DRA."""

    def within(resource: Resource) -> Resource:
        return resource if namespace is None else replace(resource, namespace=namespace)

    try:
        claims, pods, events, classes = await asyncio.gather(
            client.list(Collection(within(ALL_CLAIMS.resource), WholeClaim, labelled=selector)),
            client.list(Collection(within(Resource("pods")), WholePod)),
            client.list(Collection(within(EVENTS), SeenEvent, fields=f"reason={NOT_PREPARED}")),
            client.list(DEVICE_CLASSES),
        )
    except NotFoundError as error:
        message = f"the cluster has no {ALL_CLAIMS.resource.path}: claims need Kubernetes 1.34, GPUs by them 1.36.3"
        raise ConfigError(message, where="--kubeconfig") from error
    by_pod, by_claim = defaultdict[str, list[SeenEvent]](list), claimers(pods.items)
    for event in events.items:
        by_pod[event.involved_object.uid].append(event)
    texts = {uid: newest(found) for uid, found in by_pod.items()}
    failures = {uid: reason.text if (reason := refusal_in(text)) else text for uid, text in texts.items()}
    ours = frozenset(found.metadata.name for found in classes.items if found.selects(DRIVER))
    seen = (claim_seen(claim, by_claim, failures) for claim in claims.items)
    return tuple(
        sorted((claim for claim in seen if claim.is_ours(ours)), key=lambda claim: (claim.namespace, claim.name))
    )
