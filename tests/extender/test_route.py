"""The extender's Service leads to the process that serves, and a deposed process cannot change that."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.extender.intervals import ExtenderIntervals
from gpuvirt.extender.process import ExtenderProcess, ServiceOptions
from gpuvirt.extender.route import Backend, NoRouteError, RouteKeeper, route_of
from gpuvirt.facts.ids import ObjectName, parse_namespace
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client, MaySend
from gpuvirt.kube.failures import NotSentError
from gpuvirt.kube.kinds.core import Service, ServicePort, ServiceSpec
from gpuvirt.kube.resources import Metadata, Resource
from gpuvirt.plain import Plain
from tests.deploy.chart.helmchart import at, items
from tests.extender.podapi import PodApi, serving
from tests.extender.pods import node
from tests.extender.processes import get, is_ready, running, until

D = TypeVar("D")
NAME = ObjectName("gpuvirt-extender")
FIRST, SECOND = ServiceOptions(NAME, ("10.0.0.1",)), ServiceOptions(NAME, ("10.0.0.2", "fd00::2"))

routed = partial(running, intervals=ExtenderIntervals(route_check_s=0.1))
"""Runs processes whose route is looked after often."""


def service(address: str = "10.96.0.9", *, port: str = "http", uid: str = "s1") -> dict[str, object]:
    metadata = {"name": NAME, "namespace": "gpuvirt", "uid": uid}
    ports = [{"name": port, "port": 8888, "targetPort": 8888}]
    return {"metadata": metadata, "spec": {"clusterIP": address, "ports": ports}}


@pytest.fixture
def api() -> PodApi:
    api = PodApi()
    api.put("nodes", node("n", a=1000))
    api.services.put(NAME, service())
    return api


def leads_here(process: ExtenderProcess) -> bool:
    """Return whether the process answers, and is ready, with a Service that leads to it where it has one."""
    return is_ready(process) and process.missing is None


def stored(api: PodApi) -> Plain:
    """Return the slice; None where there is none."""
    found: Plain = api.endpoint_slices.objects.get(NAME)  # type: ignore[assignment]
    return found


def addresses(api: PodApi) -> list[Plain]:
    """Return the addresses of the slice."""
    return [address for endpoint in items(at(stored(api), "endpoints")) for address in items(at(endpoint, "addresses"))]


def leader(api: PodApi) -> Plain:
    return at(stored(api), "metadata", "annotations", "gpuvirt.io/leader")


@pytest.mark.parametrize(
    ("cluster_ip", "found", "address", "family"),
    [
        ("10.96.0.9", ("10.0.0.1",), "10.0.0.1", "IPv4"),
        ("10.96.0.9", ("fd00::1", "10.0.0.1"), "10.0.0.1", "IPv4"),
        ("fd00:96::9", ("10.0.0.1", "fd00::1"), "fd00::1", "IPv6"),
        ("None", ("fd00::1", "10.0.0.1"), "fd00::1", "IPv6"),
        ("", ("10.0.0.1",), "10.0.0.1", "IPv4"),
    ],
)
def test_a_route_has_the_family_of_the_services_address(
    cluster_ip: str, found: tuple[str, ...], address: str, family: str
) -> None:
    of = Service(Metadata(NAME), ServiceSpec(cluster_ip, (ServicePort(8888, "http"),)))
    chosen = route_of(of, found, 9000)
    assert (chosen.address, chosen.family, chosen.port.name, chosen.port.port) == (address, family, "http", 9000)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            ServiceSpec("fd00:96::9", (ServicePort(8888),)),
            "has the cluster IP fd00:96::9, and this pod has only 10.0.0.1",
        ),
        (ServiceSpec("10.96.0.9", ()), "has no port; expected one for the extender"),
    ],
)
def test_a_service_that_cannot_lead_here_has_a_reason(spec: ServiceSpec, words: str) -> None:
    with pytest.raises(NoRouteError, match=words):
        route_of(Service(Metadata(NAME), spec), ("10.0.0.1",), 8888)


async def test_the_service_leads_to_the_leader_alone(api: PodApi, tmp_path: Path) -> None:
    async with routed(api, tmp_path) as processes:
        first = await processes.start(service=FIRST)
        await until(lambda: leads_here(first))
        second = await processes.start(service=SECOND)
        await until(lambda: second.missing is None)
        assert is_ready(first)
        assert addresses(api) == ["10.0.0.1"]
        found = stored(api)
        assert at(found, "metadata", "labels") == {
            "kubernetes.io/service-name": NAME,
            "endpointslice.kubernetes.io/managed-by": "gpuvirt-extender",
        }
        assert at(found, "metadata", "ownerReferences", 0, "uid") == "s1"
        assert at(found, "ports", 0) == {"name": "http", "port": first.server.port, "protocol": "TCP"}
        assert len(api.endpoint_slices.writes) == 1, "an unchanged slice is not written again"
        processes.tasks[0].cancel()
        await until(lambda: leads_here(second))
        assert addresses(api) == ["10.0.0.2"]


async def test_a_process_that_ends_leaves_no_address(api: PodApi, tmp_path: Path) -> None:
    """Clients are refused at once then, and do not wait for a pod that is gone."""
    async with routed(api, tmp_path) as processes:
        first = await processes.start(service=FIRST)
        await until(lambda: leads_here(first))
        processes.tasks[0].cancel()
        await until(processes.tasks[0].done)
        assert (addresses(api), leader(api)) == ([], "")


async def test_a_process_that_ends_leaves_no_address_in_a_slice_that_others_have_just_changed(
    api: PodApi, tmp_path: Path
) -> None:
    async with routed(api, tmp_path) as processes:
        first = await processes.start(service=FIRST)
        await until(lambda: leads_here(first))
        redirect(api)
        processes.tasks[0].cancel()
        await until(processes.tasks[0].done)
        assert (addresses(api), leader(api)) == ([], "")


def delete(api: PodApi) -> None:
    del api.endpoint_slices.objects[NAME]


def redirect(api: PodApi) -> None:
    edited = {**api.endpoint_slices.objects[NAME], "endpoints": [{"addresses": ["10.6.6.6"]}]}
    api.endpoint_slices.put(NAME, edited)


def replace_service(api: PodApi) -> None:
    """The Service is created again, with another port; Kubernetes has not deleted the slice yet."""
    api.services.put(NAME, service(port="https", uid="s2"))


@pytest.mark.parametrize("change", [delete, redirect, replace_service])
async def test_the_leader_undoes_changes_by_others(
    api: PodApi, tmp_path: Path, change: Callable[[PodApi], None]
) -> None:
    async with routed(api, tmp_path) as processes:
        process = await processes.start(service=FIRST)
        await until(lambda: leads_here(process))
        change(api)
        await until(lambda: len(api.endpoint_slices.writes) == 2)
        assert addresses(api) == ["10.0.0.1"]
        (metadata, spec) = (api.services.objects[NAME][key] for key in ("metadata", "spec"))
        assert isinstance(metadata, dict)
        assert isinstance(spec, dict)
        assert at(stored(api), "metadata", "ownerReferences", 0, "uid") == metadata["uid"]
        assert at(stored(api), "ports", 0, "name") == spec["ports"][0]["name"]


async def test_labels_of_others_stay(api: PodApi, tmp_path: Path) -> None:
    async with routed(api, tmp_path) as processes:
        process = await processes.start(service=FIRST)
        await until(lambda: leads_here(process))
        found = api.endpoint_slices.objects[NAME]
        metadata = found["metadata"]
        assert isinstance(metadata, dict)
        labels = {**metadata["labels"], "team": "a"}
        api.endpoint_slices.put(NAME, {**found, "metadata": {**metadata, "labels": labels}})
        await until(lambda: len(api.endpoint_slices.writes) == 2)
        await RealClock().sleep(0.5)
        assert len(api.endpoint_slices.writes) == 2, "a write that changes nothing is not repeated"
        assert at(stored(api), "metadata", "labels", "team") == "a"


@pytest.mark.parametrize("without", ["option", "election"])
async def test_a_process_without_a_service_writes_no_slice(api: PodApi, tmp_path: Path, without: str) -> None:
    async with routed(api, tmp_path) as processes:
        process = await processes.start(elects=without == "option")
        await until(lambda: leads_here(process))
        assert stored(api) is None


async def test_a_leader_is_not_ready_while_the_service_does_not_lead_to_it(api: PodApi, tmp_path: Path) -> None:
    del api.services.objects[NAME]
    async with routed(api, tmp_path) as processes:
        process = await processes.start(service=FIRST)
        await until(lambda: is_ready(process))
        await until(lambda: "get services gpuvirt-extender" in str(process.missing))
        status, text = await get(process, "/readyz")
        assert (status, "the Service does not lead to this process" in text) == (503, True)
        api.services.put(NAME, service())
        await until(lambda: leads_here(process))


async def test_a_slice_of_the_other_family_is_named(api: PodApi, tmp_path: Path) -> None:
    api.endpoint_slices.put(NAME, {"metadata": {"name": NAME}, "addressType": "IPv6", "endpoints": []})
    async with routed(api, tmp_path) as processes:
        process = await processes.start(service=FIRST)
        await until(lambda: "kubectl delete endpointslice gpuvirt-extender -n gpuvirt" in str(process.missing))


class StoppedClient(Client):
    """The client of a process that is stopped after each check of its lease, right before the write."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self.has_stopped, self.goes_on = asyncio.Event(), asyncio.Event()

    @override
    async def create(
        self, resource: Resource, content: object, shape: type[D], *, may_send: MaySend | None = None
    ) -> D:
        await self._stop(may_send)
        return await super().create(resource, content, shape)

    @override
    async def update(
        self, resource: Resource, name: str, content: object, shape: type[D], *, may_send: MaySend | None = None
    ) -> D:
        await self._stop(may_send)
        return await super().update(resource, name, content, shape)

    async def _stop(self, may_send: MaySend | None) -> None:
        assert may_send is not None
        if not may_send():
            raise NotSentError("not sent")
        self.has_stopped.set()
        await self.goes_on.wait()


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.2"], ids=["of the same pod", "of another pod"])
@pytest.mark.parametrize("exists", [True, False], ids=["a slice", "no slice"])
async def test_a_process_that_was_stopped_amid_a_write_cannot_replace_its_successors_slice(
    api: PodApi, tmp_path: Path, address: str, *, exists: bool
) -> None:
    async with serving(api.answer, tmp_path) as served:
        client, namespace, leads = (
            StoppedClient(from_kubeconfig(served.kubeconfig)),
            parse_namespace("gpuvirt"),
            {"first"},
        )
        first, second = (
            RouteKeeper(of, namespace, Backend(NAME, (at_address,), me), RealClock(), partial(leads.__contains__, me))
            for of, at_address, me in ((client, "10.0.0.1", "first"), (served.client, address, "second"))
        )
        if exists:
            client.goes_on.set()
            assert await first._try(8888)
            client.goes_on.clear()
            client.has_stopped.clear()
            api.endpoint_slices.put(NAME, api.endpoint_slices.objects[NAME])  # so that it has reason to write
        async with asyncio.TaskGroup() as group:
            trying = group.create_task(first._try(8888))
            await client.has_stopped.wait()
            leads.clear()
            leads.add("second")
            assert await second._try(8888)
            client.goes_on.set()
        assert not trying.result()
        assert (addresses(api), leader(api)) == ([address], "second")
        assert await second._try(8888)
        assert len(api.endpoint_slices.writes) == (3 if exists else 2), "the successor has nothing to repair"
