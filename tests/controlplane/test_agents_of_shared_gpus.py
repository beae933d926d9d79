"""The changes that a real API server permits agents that share GPUs: one annotation of the pods of their own node."""

import itertools
import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from gpuvirt.agent.cluster.gpunode import REPORTER
from gpuvirt.clock import RealClock
from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.events import About, Event, EventDraft, EventLevel, Reporter, create, event_of
from gpuvirt.kube.failures import ApiRefusedError, ForbiddenError
from gpuvirt.kube.kinds.core import Node, Pod
from gpuvirt.kube.resources import NODES, pods
from gpuvirt.model.shares.annotations import LIMITS_ANNOTATION, SHARED_GPUS_ANNOTATION, SHARES_ANNOTATION
from tests.cluster.apilab import ACCOUNT, NAMESPACE, NODE, ApiLab
from tests.cluster.labnamespace import BOX, LabNamespace

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

ROOT = Path(__file__).parent.parent.parent
SHARES = '{"containers":{"main":{"GPU-2a1b":300}},"enforcement":"none"}'
OWNER = {"apiVersion": "v1", "kind": "Node", "name": "other", "uid": "00000000-0000-4000-8000-000000000001"}


class Agent:
    """The agent's account, and a namespace with a pod on its node, and one elsewhere."""

    def __init__(self, api: ApiLab, node: LabNamespace) -> None:
        self.client = Client(api.credentials)
        self.node = node

    def create_pod(self, name: str, node: str) -> None:
        containers = [{"name": "main", "image": BOX, "args": ["sleep 1000"]}]
        named = {"name": name, "namespace": self.node.namespace}
        metadata = {**named, "annotations": {"kept": "yes"}, "labels": {"a": "b"}}
        spec = {"nodeName": node, "containers": containers, "terminationGracePeriodSeconds": 0}
        self.node.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    async def patch(self, name: str, patch: object, part: str = "status") -> Pod:
        return await self.client.patch(pods(self.node.namespace), name, patch, PatchType.MERGE, Pod, part=part)

    async def until_guarded(self) -> None:
        """Wait until the role and the admission policies are in force, which takes the API server a while."""
        for number in itertools.count():
            changed = {"metadata": {"annotations": {"guarded": str(number)}}}
            try:
                await self.patch("here", changed)
            except ApiRefusedError:
                return
            except ForbiddenError:
                pass
            await RealClock().sleep(0.1)


@pytest.fixture
async def agent(node: LabNamespace, tmp_path: Path) -> AsyncIterator[Agent]:
    """An agent with the rights to share GPUs."""
    api = ApiLab(node.cluster, tmp_path)
    for file in ("node.yaml", "shares.yaml"):
        api.apply_roles(file)
    account = ("get", "serviceaccount", ACCOUNT, "--namespace", NAMESPACE)
    node.until(lambda: not node.cluster.kubectl(*account).returncode, lambda: f"no account {ACCOUNT}")
    api.token.write_text(api.token_of())
    agent = Agent(api, node)
    agent.create_pod("here", NODE)
    agent.create_pod("elsewhere", "other")
    await agent.until_guarded()
    yield agent
    node.kubectl("delete", "pod", "elsewhere", "--force")
    node.kubectl("delete", "-f", str(ROOT / "deploy/shares.yaml"))


async def test_an_agent_may_change_only_the_shares_of_pods_on_its_node(agent: Agent) -> None:
    shares = {"metadata": {"annotations": {SHARES_ANNOTATION: SHARES}}}
    found = await agent.patch("here", shares)
    assert found.metadata.annotations[SHARES_ANNOTATION] == SHARES
    assert found.metadata.annotations["kept"] == "yes"
    for name, patch in (
        ("elsewhere", shares),
        ("here", {"metadata": {"annotations": {"mine": "1"}}}),
        ("here", {"metadata": {"annotations": {"kept": "no"}}}),
        ("here", {"metadata": {"annotations": {"kept": None}}}),
        ("here", {"metadata": {"annotations": {SHARES_ANNOTATION: None}}}),
        ("here", {"metadata": {"labels": {"a": "c"}}}),
        ("here", {"metadata": {"labels": None}}),
        ("here", {"metadata": {"finalizers": ["example.com/stay"]}}),
        ("here", {"status": {"phase": "Succeeded"}}),
        ("here", {"status": {"conditions": None, "message": "gone"}}),
    ):
        with pytest.raises(ApiRefusedError, match="gpuvirt's agent may"):
            await agent.patch(name, patch)


async def test_an_agent_has_no_way_to_the_spec_or_the_owners_of_a_pod(agent: Agent) -> None:
    await agent.patch("here", {"spec": {"activeDeadlineSeconds": 1}, "metadata": {"ownerReferences": [OWNER]}})
    stored = json.loads(agent.node.kubectl("get", "pod", "here", "-o", "json"))
    assert "activeDeadlineSeconds" not in stored["spec"], "a patch of the status leaves the spec"
    assert "ownerReferences" not in stored["metadata"]
    for part in ("", "binding", "ephemeralcontainers", "resize"):
        with pytest.raises(ForbiddenError):
            await agent.patch("here", {"metadata": {"annotations": {SHARES_ANNOTATION: SHARES}}}, part)


async def test_an_agent_may_write_events_in_its_own_name_about_pods(agent: Agent) -> None:
    pod = json.loads(agent.node.kubectl("get", "pod", "here", "-o", "json"))["metadata"]
    about = About("v1", "Pod", "here", pod["uid"], pod["namespace"])
    at, draft = RealClock().now(), EventDraft(EventLevel.WARNING, "NoRoom", "NoRoom: pod here requests 600 units")
    ours = Reporter(REPORTER, NODE)
    await until_refused(agent, lambda at: event_of(draft, about, Reporter("kubelet", NODE), at))
    await create(agent.client, event_of(draft, about, ours, at))
    shown = agent.node.kubectl("describe", "pod", "here")
    assert "Warning  NoRoom" in shown
    assert "requests 600 units" in shown
    for reporter, object_ in (
        (Reporter(REPORTER, "other"), about),
        (ours, About("v1", "Node", NODE, NODE)),
    ):
        with pytest.raises(ApiRefusedError, match="gpuvirt's agent may write events only"):
            await create(agent.client, event_of(draft, object_, reporter, at + timedelta(seconds=1)))


async def until_refused(agent: Agent, event: Callable[[datetime], Event]) -> None:
    """Wait until the admission policy of events is in force."""
    while True:
        try:
            await create(agent.client, event(RealClock().now()))
        except ApiRefusedError:
            return
        await RealClock().sleep(0.1)


async def test_an_agent_may_name_its_nodes_shared_gpus_and_label_the_vgpu_type(agent: Agent) -> None:
    annotations = {SHARED_GPUS_ANNOTATION: '{"GPU-2a1b":1000}', "gpuvirt.io/vgpu-type-labels": "{}"}
    annotations[LIMITS_ANNOTATION] = "hami-core"
    labels = {"vgpu.type": "v100-8q-8GB", "virtual.gpu.type": "v100-8q-8GB"}

    async def patch(labels: object, annotations: object) -> Node:
        patch = {"metadata": {"annotations": annotations, "labels": labels}}
        return await agent.client.patch(NODES, NODE, patch, PatchType.MERGE, Node)

    assert (await patch(labels, annotations)).metadata.labels.items() >= labels.items()
    assert not labels.keys() & (await patch(dict.fromkeys(labels), dict.fromkeys(annotations))).metadata.labels.keys()
    with pytest.raises(ApiRefusedError, match=r"may change only the labels .*, vgpu\.type, virtual\.gpu\.type"):
        await patch({"vgpu.types": "a"}, {})
    with pytest.raises(ApiRefusedError, match=r"may change only the annotations .*gpuvirt\.io/shared-gpus"):
        await patch({}, {"mine": "a"})
