"""The annotations of the node's pods at an API server: read, checked, and written back with the UID of the pod."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest

from gpuvirt.agent.cluster.keeping import KeeperDependencies
from gpuvirt.agent.cluster.podshares import PodShareKeeper, node_pods
from gpuvirt.agent.shares.nodeshares import NodePods, NodeShares
from gpuvirt.agent.shares.sharefiles import RecordStore, SpecFiles
from gpuvirt.facts.ids import PodUid
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ApiError
from gpuvirt.kube.objects import key_of
from gpuvirt.kube.reflector import Reflector
from gpuvirt.kube.resources import Metadata
from gpuvirt.loops.cell import Cell
from gpuvirt.model.node.shares import ShareState
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION
from gpuvirt.model.shares.demand import ContainerKind, ContainerName, Units
from gpuvirt.model.shares.node.choice import NodeSharing, PodOnNode
from gpuvirt.model.shares.node.records import ContainerRecord, PodRecord, ShareLimit
from gpuvirt.model.shares.placement import GpuId, Policy
from gpuvirt.shares.confinement import RuntimeClass
from tests.agent.kubelet.kubeletnode import CLOCK, until
from tests.inlineworker import InlineWorker
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply, ScriptedApi, scripted
from tests.web.certificates import Authority, Pair

PODS = "/api/v1/pods"
UID = PodUid("uid-1")
A, B = GpuId("GPU-a"), GpuId("GPU-b")
ON_A = '{"containers":{"main":{"GPU-a":300}}}'
ON_B = '{"containers":{"main":{"GPU-b":300}},"enforcement":"none"}'


def pod(annotations: Mapping[str, str], phase: str = "Pending", limit: str = "300") -> Mapping[str, object]:
    first = {"name": "first", "restartPolicy": "Always", "resources": {"limits": {"cpu": "1"}}}
    main = {"name": "main", "resources": {"limits": {"nvidia.com/vgpu": limit}}}
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": UID, "resourceVersion": "1", "annotations": annotations},
        "spec": {"nodeName": "node01", "initContainers": [first], "containers": [main]},
        "status": {"phase": phase},
    }


class PodApi:
    """An API server with one pod."""

    def __init__(self, only: Mapping[str, object]) -> None:
        self.pod = only
        self.patches: list[Mapping[str, object]] = []
        self.refusal: Reply | None = None

    def answer(self, call: Call) -> Reply:
        if call.path == PODS:
            assert "spec.nodeName%3Dnode01" in call.target
            items = {"metadata": {"resourceVersion": "1"}, "items": [self.pod]}
            return 200, _silence() if "watch=1" in call.target else items
        assert (call.method, call.path) == ("PATCH", "/api/v1/namespaces/ns/pods/p/status")
        self.patches.append(json.loads(call.body))
        return self.refusal or (200, self.pod)


async def _silence() -> AsyncIterator[object]:
    await asyncio.get_running_loop().create_future()
    yield {}


class Followed:
    """The shares of a node whose pods are followed."""

    def __init__(self, api: PodApi, shares: NodeShares, keeper: PodShareKeeper) -> None:
        self.api = api
        self.shares = shares
        self.keeper = keeper
        self.errors: list[ApiError] = []

    async def give(self, gpu: GpuId, limit: ShareLimit | None = None) -> None:
        """Let the pod's container have a GPU."""
        main = ContainerRecord(ContainerKind.APP, Units(300), {gpu: Units(300)}, limit=limit)
        record = PodRecord("ns", "p", {ContainerName("main"): main})
        await self.shares.store.save(self.shares.store.records.get().with_pod(UID, record))

    def report(self, error: ApiError | None) -> None:
        if error is not None:
            self.errors.append(error)


@asynccontextmanager
async def following(api: PodApi, served: ScriptedApi, authority: Authority, folder: Path) -> AsyncIterator[Followed]:
    """Follow the pods for as long as the context lasts, and keep their annotations."""
    store = RecordStore(folder / "shares.json", InlineWorker())
    sharing = NodeSharing({A: Units(1000)})
    files = SpecFiles(folder / "cdi", ())
    shares = NodeShares(store, files, NodePods(), Cell(ShareState(sharing, node=sharing)))
    credentials = Credentials("127.0.0.1", served.port, "gpuvirt", ca=authority.certificate, token=b"x")
    dependencies = KeeperDependencies(Client(credentials), "node01", CLOCK, Random(1))  # noqa: S311
    keeper = PodShareKeeper(dependencies, shares)
    followed = Followed(api, shares, keeper)
    reflector = Reflector(dependencies.client, node_pods("node01"), CLOCK, dependencies.random)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(reflector.run(keeper.observe, followed.report)),
            group.create_task(keeper.run(followed.report)),
        ]
        await until(lambda: shares.pods.known is not None)
        yield followed
        for task in tasks:
            task.cancel()


@asynccontextmanager
async def follow(api: PodApi, server: Pair, authority: Authority, folder: Path) -> AsyncIterator[Followed]:
    async with (
        scripted(api.answer, server, authority.certificate) as served,
        following(api, served, authority, folder) as followed,
    ):
        yield followed


def known(followed: Followed) -> PodOnNode:
    return (followed.shares.pods.known or {})[UID]


async def test_a_pod_that_requires_limits_is_judged_again_once_its_runtime_is_known(
    authority: Authority, server: Pair, tmp_path: Path
) -> None:
    found = pod({"gpuvirt.io/enforcement": "required"})
    spec = {**msgspec.convert(found["spec"], dict[str, object]), "runtimeClassName": "nvidia"}
    async with follow(PodApi({**found, "spec": spec}), server, authority, tmp_path) as followed:
        reason = known(followed).unconfined
        assert reason is not None
        assert "is not known" in reason.message
        for handler, code in (("nvidia", None), ("runsc", ReasonCode.NO_LIMIT_HOLDS)):
            found_class = RuntimeClass(Metadata(name="nvidia"), handler)
            key = key_of(found_class)
            followed.keeper.observe_classes(Delta({key: found_class}, frozenset({key})))
            after = known(followed).unconfined
            assert (after.code if after is not None else None) is code


async def test_the_choice_of_the_extender_is_read(authority: Authority, server: Pair, tmp_path: Path) -> None:
    annotations = {SHARES_ANNOTATION: ON_A, "gpuvirt.io/shares-policy": "spread"}
    async with follow(PodApi(pod(annotations)), server, authority, tmp_path) as followed:
        found = known(followed)
        assert found.desired is not None
        assert found.desired.used == {A: 300}
        assert [(container.name, container.kind) for container in found.demand.containers] == [
            ("main", ContainerKind.APP)
        ]
        assert found.policy is Policy.SPREAD


@pytest.mark.parametrize("text", ["", "{", '{"containers":{"main":{"GPU-a":299}}}', '{"containers":{}}'])
async def test_an_edited_annotation_does_not_count(
    authority: Authority, server: Pair, tmp_path: Path, text: str
) -> None:
    annotations = {SHARES_ANNOTATION: text, "gpuvirt.io/shares-policy": "other"}
    async with follow(PodApi(pod(annotations)), server, authority, tmp_path) as followed:
        assert known(followed).desired is None
        assert known(followed).policy is None


@pytest.mark.parametrize(("text", "requires"), [("required", True), ("", False), ("none", True)])
async def test_a_pod_requires_limits_by_its_annotation(
    authority: Authority, server: Pair, tmp_path: Path, text: str, *, requires: bool
) -> None:
    """A value that is not understood counts as required: never less than the pod may have requested."""
    async with follow(PodApi(pod({"gpuvirt.io/enforcement": text})), server, authority, tmp_path) as followed:
        assert known(followed).requires_limits is requires


@pytest.mark.parametrize("limit", ["0", "1500", "-1", "x", "0.5"])
async def test_a_pod_without_a_valid_request_has_no_share(
    authority: Authority, server: Pair, tmp_path: Path, limit: str
) -> None:
    async with follow(PodApi(pod({}, limit=limit)), server, authority, tmp_path) as followed:
        assert followed.shares.pods.known == {}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_a_pod_whose_containers_have_ended_counts_no_more(
    authority: Authority, server: Pair, tmp_path: Path, phase: str
) -> None:
    async with follow(PodApi(pod({}, phase)), server, authority, tmp_path) as followed:
        assert known(followed).ended


@pytest.mark.parametrize("annotations", [{}, {SHARES_ANNOTATION: ON_A}, {SHARES_ANNOTATION: "{"}])
async def test_the_gpu_of_a_pod_is_written_back_once_with_its_uid(
    authority: Authority, server: Pair, tmp_path: Path, annotations: Mapping[str, str]
) -> None:
    api = PodApi(pod(annotations))
    async with follow(api, server, authority, tmp_path) as followed:
        await followed.give(B)
        await until(lambda: bool(api.patches))
        await CLOCK.sleep(0.05)
        assert api.patches == [{"metadata": {"uid": UID, "annotations": {SHARES_ANNOTATION: ON_B}}}]
        await followed.give(A)
        if annotations.get(SHARES_ANNOTATION) != ON_A:
            await until(lambda: len(api.patches) == 2)


async def test_an_annotation_that_is_right_is_not_written(authority: Authority, server: Pair, tmp_path: Path) -> None:
    api = PodApi(pod({SHARES_ANNOTATION: ON_A}))
    async with follow(api, server, authority, tmp_path) as followed:
        await followed.give(A)
        await CLOCK.sleep(0.05)
        assert api.patches == []


@pytest.mark.parametrize("refusal", [NOT_FOUND, CONFLICT])
async def test_another_pod_of_the_same_name_is_left_alone(
    authority: Authority, server: Pair, tmp_path: Path, refusal: Reply
) -> None:
    api = PodApi(pod({}))
    api.refusal = refusal
    async with follow(api, server, authority, tmp_path) as followed:
        await followed.give(A)
        await until(lambda: bool(api.patches))
        await CLOCK.sleep(0.05)
        assert len(api.patches) == 1
        assert followed.errors == []


@pytest.mark.parametrize("annotated", ["none", "hami-core", "of-another-version"])
async def test_the_annotation_says_whether_the_shares_are_limits(
    authority: Authority, server: Pair, tmp_path: Path, annotated: str
) -> None:
    api = PodApi(pod({SHARES_ANNOTATION: ON_B.replace("none", annotated)}))
    async with follow(api, server, authority, tmp_path) as followed:
        assert known(followed).desired is not None, "whatever another version of gpuvirt knows"
        await followed.give(B, ShareLimit(4915, 30))
        if annotated != "hami-core":
            await until(lambda: bool(api.patches))
        await CLOCK.sleep(0.05)
        right = {"uid": UID, "annotations": {SHARES_ANNOTATION: ON_B.replace("none", "hami-core")}}
        assert api.patches == ([{"metadata": right}] if annotated != "hami-core" else [])
