"""The route to the leader: the EndpointSlice by which the extender's Service leads to the process that serves.

The Service has no selector, so that a standby can be ready without being asked: helm, rollouts and PodDisruptionBudgets
need replicas that are ready. The leader writes the slice, and writes it again after each change by others. A process
that was deposed cannot replace its successor's slice:

- Each write needs the version of the slice that was read before, and is sent only while this process has the lease,
  which is checked after that read. A successor writes after that, and then the version is another one.
- The slice names its leader, so that a successor's first write changes the slice even where both have one address.
  The API server keeps the version of an object that a write does not change.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from ipaddress import ip_address

import msgspec

from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.extender.intervals import INTERVALS, ExtenderIntervals
from gpuvirt.facts.ids import Namespace, ObjectName
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError, ConflictError, NotFoundError, retried
from gpuvirt.kube.kinds import workloads
from gpuvirt.kube.kinds.core import Service
from gpuvirt.kube.kinds.parts import OwnerReference
from gpuvirt.kube.resources import Metadata, Resource, services

# EndpointSlices: the addresses behind a Service, as the nodes' proxies read them.
#
# Source: discovery.k8s.io/v1 (Kubernetes' API reference). Other programs write the slices of a Service without a
# selector. kube-proxy joins the Service's port with the port of a slice by their name.
SERVICE_LABEL = "kubernetes.io/service-name"
"""The Service that a slice belongs to."""
MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"
"""The program that writes a slice; Kubernetes' own controllers leave the slices of others alone."""


class StoredSlice(msgspec.Struct, frozen=True, rename="camel"):
    """A slice at the API server, without its addresses."""

    metadata: Metadata
    address_type: str = ""


class SliceMetadata(Metadata, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of a slice with its owner: Kubernetes deletes the slice after the owner."""

    owner_references: tuple[OwnerReference, ...] = ()


class Conditions(msgspec.Struct, frozen=True):
    """The state of an endpoint; proxies send connections to endpoints that are ready."""

    ready: bool = True
    serving: bool = True
    terminating: bool = False


class Endpoint(msgspec.Struct, frozen=True):
    """One address behind a Service."""

    addresses: tuple[str, ...]
    conditions: Conditions = Conditions()


class EndpointPort(msgspec.Struct, frozen=True):
    """The port at which the endpoints of a slice listen; it has the name of the Service's port."""

    name: str
    port: int
    protocol: str = "TCP"


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A slice to write: addresses of one family behind a Service."""

    metadata: SliceMetadata
    address_type: str
    """IPv4 or IPv6; it cannot be changed."""
    endpoints: tuple[Endpoint, ...]
    ports: tuple[EndpointPort, ...]
    api_version: str = "discovery.k8s.io/v1"
    kind: str = "EndpointSlice"


def endpoint_slices(namespace: str) -> Resource:
    """Return the EndpointSlices of a namespace."""
    return Resource("endpointslices", "discovery.k8s.io", "v1", namespace)


log = logging.getLogger(__name__)

MANAGER = "gpuvirt-extender"
LEADER_ANNOTATION = "gpuvirt.io/leader"
"""The process whose address is in the slice, by its name in the election; empty while no process leads."""


class NoRouteError(GpuvirtError):
    """The Service cannot lead to this process; the text has the reason."""


class Backend(msgspec.Struct, frozen=True):
    """This process as an endpoint of the Service."""

    service: ObjectName
    """The name of the Service, and of the slice."""
    addresses: tuple[str, ...]
    """The addresses of the pod, at most one of each family."""
    me: str
    """The name of this process in the election."""


class Route(msgspec.Struct, frozen=True):
    """The way from a Service to one process."""

    service: Metadata
    family: str
    address: str
    port: EndpointPort


def route_of(service: Service, addresses: Sequence[str], port: int) -> Route:
    """Return the route to a process with these addresses; raise NoRouteError.

    kube-scheduler has the Service's cluster IP, and proxies send its connections to endpoints of the same family alone.
    """
    at, ports = service.spec.cluster_ip, service.spec.ports
    where = f"Service {service.metadata.name}"
    if not ports:
        raise NoRouteError(f"{where} has no port; expected one for the extender")
    version = ip_address(at).version if at and at != "None" else ip_address(addresses[0]).version
    found = next((address for address in addresses if ip_address(address).version == version), None)
    if found is None:
        raise NoRouteError(
            f"{where} has the cluster IP {at}, and this pod has only {', '.join(addresses)}; expected an address of the"
            " same family: set the ipFamilies of the Service to that of the pods"
        )
    return Route(service.metadata, f"IPv{version}", found, EndpointPort(ports[0].name, port))


def slice_of(route: Route, found: Metadata, leader: str) -> EndpointSlice:
    """Return the slice to write; without a leader it has no address. Labels and annotations of others stay."""
    service = route.service
    owner = OwnerReference(api_version=workloads.CORE, kind="Service", name=service.name, uid=service.uid)
    metadata = SliceMetadata(
        name=service.name,
        namespace=service.namespace,
        resource_version=found.resource_version,
        labels={**found.labels, SERVICE_LABEL: service.name, MANAGER_LABEL: MANAGER},
        annotations={**found.annotations, LEADER_ANNOTATION: leader},
        owner_references=(owner,),
    )
    endpoints = (Endpoint((route.address,)),) if leader else ()
    return EndpointSlice(metadata=metadata, address_type=route.family, endpoints=endpoints, ports=(route.port,))


class RouteKeeper:
    """Keeps the slice for one term of this process."""

    def __init__(
        self,
        client: Client,
        namespace: Namespace,
        backend: Backend,
        clock: Clock,
        may_write: Callable[[], bool],
        intervals: ExtenderIntervals = INTERVALS,
    ) -> None:
        self._intervals = intervals
        self.missing: str | None = f"the EndpointSlice {backend.service} is not written yet"
        """Why the Service has not led here in this term; None once it has."""
        self._client = client
        self._at = endpoint_slices(namespace)
        self._services = services(namespace)
        self._backend = backend
        self._clock = clock
        self._may_write = may_write
        """Whether this process has the lease at this moment."""
        self._written: tuple[Route, Metadata] | None = None
        """The route of the last write, and the metadata that the API server answered."""
        self._problem = ""

    async def keep(self, port: int) -> None:
        """Have the Service lead to a port of this process, until cancelled; then to none."""
        try:
            while True:
                is_written, every = await self._try(port), self._intervals
                await self._clock.sleep(every.route_check_s if is_written else every.route_again_s)
        finally:
            await self._withdraw()

    async def _try(self, port: int) -> bool:
        """Write the slice if that is due; return whether it is as desired."""
        try:
            async with asyncio.timeout(self._intervals.route_try_s):
                await retried(lambda: self._write_if_due(port), self._clock)
        except (ApiError, NoRouteError, TimeoutError) as error:
            problem = f"the Service does not lead to this process: {str(error) or 'the API server does not answer'}"
            if self.missing is not None:
                self.missing = problem
            if problem != self._problem:
                log.warning("%s", problem)
            self._problem = problem
            return False
        self.missing, self._problem = None, ""
        return True

    async def _write_if_due(self, port: int) -> None:
        """Write the slice unless it is as this process has written it; raise ApiError and NoRouteError."""
        name = self._backend.service
        service = await self._client.get(self._services, name, Service)
        route = route_of(service, self._backend.addresses, port)
        try:
            found = await self._client.get(self._at, name, StoredSlice)
        except NotFoundError:
            found = StoredSlice(Metadata(), route.family)
        if found.address_type != route.family:
            raise NoRouteError(
                f"the EndpointSlice {name} is for {found.address_type} and cannot be changed, expected {route.family};"
                f" delete it: kubectl delete endpointslice {name} -n {self._at.namespace}"
            )
        if self._written is not None and _is_same(self._written, route, found.metadata):
            return
        await self._write(route, found.metadata, self._backend.me)
        log.info("the Service leads to this process", extra={"service": name, "address": route.address})

    async def _write(self, route: Route, found: Metadata, leader: str) -> None:
        """Write the slice if it still has the version that was read, and this process the lease; raise ApiError."""
        content = slice_of(route, found, leader)
        if found.resource_version:
            name = self._backend.service
            stored = await self._client.update(self._at, name, content, StoredSlice, may_send=self._may_write)
        else:
            stored = await self._client.create(self._at, content, StoredSlice, may_send=self._may_write)
        self._written = route, stored.metadata

    async def _withdraw(self) -> None:
        """Remove the address, so that clients are refused at once until the next leader has written its own."""
        if self._written is None or not self._may_write():
            return
        route, metadata = self._written
        try:
            async with asyncio.timeout(self._intervals.route_withdraw_s):
                try:
                    await self._write(route, metadata, "")
                except ConflictError:  # changed since, such as by Kubernetes after its owner
                    found = await self._client.get(self._at, self._backend.service, StoredSlice)
                    await self._write(route, found.metadata, "")
        except (ApiError, TimeoutError) as error:
            log.info("the EndpointSlice keeps the address of this process until the next leader: %s", error)


def _is_same(written: tuple[Route, Metadata], route: Route, found: Metadata) -> bool:
    before, stored = written
    is_same_service = before.service.uid == route.service.uid and before.port == route.port
    return is_same_service and before.address == route.address and stored.resource_version == found.resource_version
