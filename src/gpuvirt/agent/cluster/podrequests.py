"""The requests of the pods of the agent's node, listed only while the kubelet's record of allocations is in doubt."""

from collections.abc import Iterator

from gpuvirt.agent.cluster.keeping import KeeperDependencies, ReportOutcome
from gpuvirt.agent.known.podinquiry import PodInquiry
from gpuvirt.facts.ids import PodUid, ResourceName
from gpuvirt.kube.collection import Collection
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.kinds.core import ENDED, STATIC_POD, Container, WholePod
from gpuvirt.kube.resources import Resource
from gpuvirt.model.allocation.recordhistory import PodRequests

PAUSE_S = 15.0
"""The shortest time between two lists."""


def requests_of(pod: WholePod) -> PodRequests:
    """Return the resources that a pod requests."""
    spec, status = pod.spec, pod.status
    return PodRequests(
        PodUid(pod.metadata.annotations.get(STATIC_POD, pod.metadata.uid)),
        pod.where,
        status.phase in ENDED,
        frozenset(_extended(*spec.containers, *spec.init_containers)),
        bool(spec.resource_claims) or bool(status.extended_resource_claim_status),
    )


def _extended(*containers: Container) -> Iterator[tuple[str, ResourceName]]:
    """Yield the extended resources of containers (IsExtendedResourceName in pkg/apis/core/v1/helper)."""
    for container in containers:
        quantities = {**container.resources.requests, **container.resources.limits}
        for name, quantity in quantities.items():
            if "/" in name and "kubernetes.io/" not in name and str(quantity) != "0":
                yield container.name, ResourceName(name)


async def answer_inquiry(inquiry: PodInquiry, dependencies: KeeperDependencies, report: ReportOutcome) -> None:
    """Answer each question for the node's pods, for ever; `report` gets each error, and None after a success."""
    pods = Collection(Resource("pods"), WholePod, on_node=dependencies.node)
    while True:
        await inquiry.asked.wait()
        number = inquiry.begin()
        try:
            listed = await dependencies.client.list(pods)
        except ApiError as error:
            report(error)
        else:
            report(None)
            inquiry.answer(number, [requests_of(pod) for pod in listed.items])
        await dependencies.clock.sleep(PAUSE_S)
