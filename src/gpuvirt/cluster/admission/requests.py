"""What the containers of a pod request: vGPUs, mediated devices, and units of shared GPUs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpuvirt.cluster.admission.pod import Group, Placed, Pod
from gpuvirt.errors import DamagedError
from gpuvirt.model.shares.quantities import InvalidQuantityError, units_of

Chosen = Callable[[str], bool]
"""Whether a resource counts."""


class InvalidAmountError(DamagedError):
    """An amount is no whole number; `path` is its place in the pod."""

    def __init__(self, path: str, detail: str) -> None:
        super().__init__(detail)
        self.path = path


@dataclass(frozen=True, slots=True)
class Requested:
    """An amount of a resource that a container requests."""

    placed: Placed
    field: str
    """limits or requests."""
    resource: str
    amount: str | int | float

    @property
    def path(self) -> str:
        """The place in the pod, for messages."""
        return f'{self.placed.path}.resources.{self.field}["{self.resource}"]'

    @property
    def units(self) -> int:
        """The amount; raises InvalidAmountError for what is no whole number."""
        try:
            return int(units_of(str(self.amount)))
        except InvalidQuantityError as error:
            raise InvalidAmountError(self.path, str(error)) from error


def requests_of(placed: Placed, chosen: Chosen) -> Iterator[Requested]:
    """Yield the resources that count of a container; a limit without a request is a request, too."""
    resources = placed.container.resources
    for resource, amount in resources.limits.items():
        if chosen(resource):
            yield Requested(placed, "limits", resource, amount)
    for resource, amount in resources.requests.items():
        if chosen(resource) and resource not in resources.limits:
            yield Requested(placed, "requests", resource, amount)


def requested(pod: Pod, chosen: Chosen) -> tuple[Requested, ...]:
    """Return all requests of the resources that count, but those of amount 0; raises InvalidAmountError."""
    found = (request for placed in pod.placed() for request in requests_of(placed, chosen))
    return tuple(request for request in found if request.units > 0)


def effective(requests: tuple[Requested, ...]) -> Mapping[str, int]:
    """Return what the whole pod needs, as the scheduler counts it: an init container that has as much adds nothing.

    Init containers run one after another, sidecars and the other containers together. The kubelet gives the devices of
    an init container to the containers after it.
    """
    lasting: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for request in requests:
        if request.placed.group is Group.INIT and not request.placed.container.is_sidecar:
            most[request.resource] = max(most[request.resource], lasting[request.resource] + request.units)
        else:
            lasting[request.resource] += request.units
    return dict(sorted((most | lasting).items()))
