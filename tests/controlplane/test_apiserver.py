"""Clients of a real API server: desired state and reports survive outages, restarts and broken connections."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import yaml
from lab.cluster import settings
from lab.cluster.playedcluster import PlayedCluster

from gpuvirt.kube.client import Client, PatchType
from gpuvirt.kube.failures import (
    ApiError,
    ApiRefusedError,
    ConflictError,
    ForbiddenError,
    GoneError,
    NotFoundError,
    UnreachableError,
)
from gpuvirt.kube.kinds.core import ConfigMap, Node
from gpuvirt.kube.labels import (
    CONFIG_LABEL,
    REASON_ANNOTATION,
    STATE_LABEL,
    WORKLOAD_REASON_ANNOTATION,
    WORKLOAD_STATE_LABEL,
)
from gpuvirt.kube.resources import NODES, Collection, Resource, config_maps, pods
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed, Progress, StateName
from gpuvirt.model.reasons import ReasonCode
from tests.cluster.apilab import (
    ACCOUNT,
    MAPS,
    NAMESPACE,
    NODE,
    ApiLab,
    Listener,
    agents_api,
    following,
    proxied,
    until,
    until_guarded,
)
from tests.cluster.labnamespace import BOX

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("controlplane")]

WHERE = f"ConfigMap {NAMESPACE}/{MAPS}, key config.yaml"
SOON_S = 10.0
"""Sooner than anything is looked at again that no watch tells of, and later than a busy host takes."""
STATE = r".metadata.labels.nvidia\.com/vgpu\.config\.state"
REASON = r".metadata.annotations.gpuvirt\.io/vgpu\.config\.reason"
A10 = "nvidia.com/GA102GL_A10"
POD = {"apiVersion": "v1", "kind": "Pod"}
PENDING = Progress(StateName.PENDING, "waits for pod default/vm-a")
SUCCESS = Progress(StateName.SUCCESS)


@pytest.fixture
def api(lab: PlayedCluster, tmp_path: Path) -> ApiLab:
    return agents_api(lab, tmp_path)


def admin(api: ApiLab) -> Client:
    return Client(replace(api.credentials, token=settings.TOKENS.partition(",")[0].encode()))


async def test_a_label_and_a_config_map_are_observed_and_so_is_their_deletion(api: ApiLab) -> None:
    async with following(api.credentials) as observed:
        await until(
            lambda: (
                observed.desired
                == NodeRequest(Observed(None), Observed(None), Observed(None), enforcement=Observed(None))
            ),
            lambda: observed,
        )
        api.label(f"{CONFIG_LABEL}=A10-4Q")
        await until(lambda: observed.desired.config == Observed("A10-4Q"), lambda: observed, SOON_S)
        api.set_configs("version: v1")
        text = Observed(ConfigText("version: v1", WHERE))
        await until(lambda: observed.desired.configs == text, lambda: observed, SOON_S)
        api.label(f"{CONFIG_LABEL}=A10-8Q")
        await until(
            lambda: (
                observed.desired == NodeRequest(Observed("A10-8Q"), text, Observed(None), enforcement=Observed(None))
            ),
            lambda: observed,
            SOON_S,
        )
        api.label(f"{CONFIG_LABEL}-")
        await until(lambda: observed.desired.config == Observed(None), lambda: observed, SOON_S)
        api.set_configs(None)
        await until(lambda: observed.desired.configs == Observed(None), lambda: observed, SOON_S)
        assert observed.codes == []


async def test_broken_connections_lose_no_event(api: ApiLab) -> None:
    async with proxied(api.credentials) as (proxy, through), following(through) as observed:
        await until(lambda: observed.desired.config == Observed(None), lambda: observed)
        for desired in ("c0", "c1", "c2"):
            proxy.cut()
            api.label(f"{CONFIG_LABEL}={desired}")
            await until(partial(observed.wants, desired), lambda: observed)
        await until(lambda: not observed.problems, lambda: observed.problems)
        assert set(observed.codes) == {ReasonCode.API_SERVER_AWAY}


async def test_deletions_during_an_outage_are_observed_after_the_api_server_restarts(api: ApiLab) -> None:
    """A started server keeps no older versions, so no watch reports earlier deletions."""
    api.label(f"{CONFIG_LABEL}=A10-4Q")
    api.set_configs("version: v1")
    desired = NodeRequest(
        Observed("A10-4Q"), Observed(ConfigText("version: v1", WHERE)), Observed(None), enforcement=Observed(None)
    )
    async with proxied(api.credentials) as (proxy, through), following(through) as observed:
        await until(lambda: observed.desired == desired, lambda: observed)
        proxy.open = False
        proxy.cut()
        maps = Collection(config_maps(NAMESPACE), ConfigMap, MAPS)
        last = (await Client(api.credentials).list(maps)).version
        api.set_configs(None)
        api.label(f"{CONFIG_LABEL}=A10-8Q")
        api.cluster.stop("apiserver")
        await until(lambda: len(observed.codes) >= 2, lambda: observed.codes)
        assert observed.desired == desired, "the state stays during the outage"
        await asyncio.to_thread(api.cluster.restart_after_outage)  # noqa: TID251  the agent's loop goes on meanwhile
        with pytest.raises(GoneError):
            async with Client(api.credentials).watch(maps, last, for_s=5) as events:
                assert [event async for event in events] == []
        proxy.open = True
        await until(
            lambda: (
                observed.desired
                == NodeRequest(Observed("A10-8Q"), Observed(None), Observed(None), enforcement=Observed(None))
            ),
            lambda: observed,
        )
        await until(lambda: not observed.problems, lambda: observed.problems)


async def test_a_listener_that_fails_gets_the_same_delta_again(api: ApiLab) -> None:
    observed = Listener(failures=2)
    api.label(f"{CONFIG_LABEL}=A10-4Q")
    async with following(api.credentials, observed):
        await until(
            lambda: (
                observed.desired
                == NodeRequest(Observed("A10-4Q"), Observed(None), Observed(None), enforcement=Observed(None))
            ),
            lambda: observed,
        )
    assert observed.failures == 0


async def test_the_api_server_makes_no_write_after_its_deadline(api: ApiLab) -> None:
    name = "bound-in-time"
    container = {"name": "main", "image": BOX, "args": ["sleep 1000"]}
    spec = {"schedulerName": "nobody", "containers": [container], "terminationGracePeriodSeconds": 0}
    metadata = {"name": name, "namespace": "default"}
    api.kubectl("apply", "-f", "-", given=yaml.safe_dump({**POD, "metadata": metadata, "spec": spec}))
    binding = {**POD, "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "elsewhere"}}
    try:
        bind = partial(admin(api).create_part, pods("default"), name, "binding", binding, may_send=lambda: True)
        with pytest.raises(ApiError, match=r"imeout|deadline|closed the connection"):
            await bind(within_s=0.000001)
        assert not api.kubectl("get", "pod", name, "-o", "jsonpath={.spec.nodeName}")
        await bind(within_s=30.0)
        assert api.kubectl("get", "pod", name, "-o", "jsonpath={.spec.nodeName}") == "elsewhere"
    finally:
        api.kubectl("delete", "pod", name, "--force")


async def test_long_lists_are_read_in_pages(api: ApiLab) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        api.kubectl("create", "configmap", name, "--namespace", NAMESPACE)
    found = await admin(api).list(Collection(config_maps(NAMESPACE), ConfigMap), page=2)
    assert {item.metadata.name for item in found.items} >= set(names)
    assert int(found.version) > 0


async def test_a_replaced_token_is_used(api: ApiLab) -> None:
    good = api.token.read_text()
    async with proxied(api.credentials) as (proxy, through), following(through) as observed:
        await until(lambda: observed.desired.config == Observed(None), lambda: observed)
        api.token.write_text("expired")
        while ReasonCode.API_FORBIDDEN not in observed.codes:
            proxy.cut()  # one cut misses a watch that is about to connect with the token that it has read
            with suppress(AssertionError):
                await until(lambda: ReasonCode.API_FORBIDDEN in observed.codes, lambda: observed.codes, SOON_S)
        api.label(f"{CONFIG_LABEL}=A10-4Q")
        api.token.write_text(good)
        await until(lambda: observed.desired.config == Observed("A10-4Q"), lambda: observed)
        await until(lambda: not observed.problems, lambda: observed.problems)


async def test_a_server_with_an_unknown_certificate_is_refused(api: ApiLab) -> None:
    with pytest.raises(UnreachableError, match="certificate verify failed"):
        await Client(replace(api.credentials, ca=None)).list(Collection(NODES, Node, NODE))
    with pytest.raises(UnreachableError, match="IP address mismatch"):
        await Client(replace(api.credentials, server_name="192.0.2.1")).list(Collection(NODES, Node, NODE))


@pytest.mark.parametrize(
    ("resource", "name", "rule"),
    [
        (Resource("secrets", namespace=NAMESPACE), None, '{apiGroups: [""], resources: [secrets], verbs: [list]}'),
        (Resource("services"), None, '{apiGroups: [""], resources: [services], verbs: [list]}'),
        (config_maps(NAMESPACE), None, '{apiGroups: [""], resources: [configmaps], verbs: [list]}'),
        (config_maps(NAMESPACE), "other", '{apiGroups: [""], resources: [configmaps], verbs: [list]}'),
        (config_maps("kube-system"), MAPS, '{apiGroups: [""], resources: [configmaps], verbs: [list]}'),
    ],
)
async def test_requests_without_rights_are_refused(
    api: ApiLab, resource: Resource, name: str | None, rule: str
) -> None:
    with pytest.raises(ForbiddenError) as refused:
        await Client(api.credentials).list(Collection(resource, ConfigMap, name))
    assert rule in str(refused.value)


OWNER = {"apiVersion": "v1", "kind": "Node", "name": "other", "uid": "00000000-0000-4000-8000-000000000001"}
"""An owner reference by which the garbage collector deletes a node."""


async def test_an_agent_may_change_only_its_own_keys_on_its_own_node(api: ApiLab) -> None:
    client = Client(api.credentials)
    await until_guarded(client)
    api.kubectl("create", "-f", "-", given='{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}')

    async def patch(name: str, patch: object) -> Node:
        return await client.patch(NODES, name, patch, PatchType.MERGE, Node)

    try:
        state = {"metadata": {"labels": {STATE_LABEL: "pending"}, "annotations": {REASON_ANNOTATION: "why"}}}
        assert (await patch(NODE, state)).metadata.labels[STATE_LABEL] == "pending"
        workload = {
            "metadata": {
                "labels": {WORKLOAD_STATE_LABEL: "pending"},
                "annotations": {WORKLOAD_REASON_ANNOTATION: "why"},
            }
        }
        assert (await patch(NODE, workload)).metadata.labels[WORKLOAD_STATE_LABEL] == "pending"
        for name, refused in (
            ("other", state),
            (NODE, {"metadata": {"labels": {"a": "b"}}}),
            (NODE, {"metadata": {"labels": {"kubernetes.io/hostname": None}}}),
            (NODE, {"metadata": {"annotations": {"a": "b"}}}),
            (NODE, {"spec": {"unschedulable": True}}),
            (NODE, {"metadata": {"finalizers": ["example.com/stay"]}}),
            (NODE, {"metadata": {"ownerReferences": [OWNER]}}),
        ):
            with pytest.raises(ApiRefusedError, match="gpuvirt's agent may"):
                await patch(name, refused)
        with pytest.raises(ForbiddenError, match=r"get nodes node01.*verbs: \[get\]"):
            await client.get(NODES, NODE, Node)
    finally:
        api.kubectl("delete", "node", "other")


async def test_an_agent_may_change_only_extended_resources_in_its_own_nodes_status(api: ApiLab) -> None:
    client = Client(api.credentials)
    await until_guarded(client)
    api.kubectl("create", "-f", "-", given='{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}')

    async def patch(name: str, status: object) -> Node:
        return await client.patch(NODES, name, {"status": status}, PatchType.MERGE, Node, part="status")

    async def is_refused(name: str, status: object) -> bool:
        """Return whether a change is refused; the kubelet may have removed the count, and then nothing changes."""
        for _ in range(5):
            await patch(NODE, counts)
            try:
                await patch(name, status)
            except ApiRefusedError as error:
                return "gpuvirt's agent may" in str(error)
        return False

    counts = {"allocatable": {"example.com/gpu": "3"}}
    try:
        assert (await patch(NODE, counts)).status.allocatable["example.com/gpu"] == "3"
        for name, status in (
            ("other", counts),
            (NODE, {"allocatable": {"cpu": "999999"}}),
            (NODE, {"allocatable": {"example.com/gpu": None}}),
            (NODE, {"capacity": {"example.com/gpu": "3"}}),
            (NODE, {"conditions": None}),
            (NODE, {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}),
        ):
            assert await is_refused(name, status), status
    finally:
        api.kubectl("delete", "node", "other")


async def test_the_state_label_is_written_and_restored(api: ApiLab) -> None:
    async with following(api.credentials) as agent:
        agent.reports.vgpus.set(PENDING)
        await until(lambda: api.node_field(STATE) == "pending", lambda: agent)
        assert api.node_field(REASON) == PENDING.reason
        agent.reports.vgpus.set(SUCCESS)
        await until(lambda: api.node_field(STATE) == "success", lambda: agent)
        assert api.node_field(REASON) == "", "a success has no reason annotation"
        api.label(f"{STATE_LABEL}=failed")
        await until(lambda: api.node_field(STATE) == "success", lambda: agent)
        assert agent.codes == []


async def test_a_state_during_an_outage_is_written_after_the_outage(api: ApiLab) -> None:
    async with following(api.credentials) as agent:
        await until(lambda: agent.observations.desired.config is not None, lambda: agent)
        api.cluster.stop("apiserver")
        agent.reports.vgpus.set(PENDING)
        await until(lambda: "cluster: state" in agent.problems, lambda: agent.problems)
        agent.reports.vgpus.set(SUCCESS)
        await asyncio.to_thread(api.cluster.restart_after_outage)  # noqa: TID251  the agent's loop goes on meanwhile
        await until(lambda: api.node_field(STATE) == "success", lambda: agent)
        await until(lambda: not agent.problems, lambda: agent.problems)


async def test_with_roles_that_only_permit_updates_no_change_of_others_is_lost(api: ApiLab) -> None:
    """NVIDIA's roles: get, list, watch, update. Another writer changes the node meanwhile, and updates conflict."""
    role = '[{"op": "replace", "path": "/rules/0/verbs", "value": ["get", "list", "watch", "update"]}]'
    api.kubectl("patch", "clusterrole", ACCOUNT, "--type=json", "-p", role)
    other, names = admin(api), [f"example.com/other-{number}" for number in range(60)]
    async with following(api.credentials) as agent:
        await until(lambda: agent.observations.desired.config is not None, lambda: agent)

        async def write_others() -> None:
            for number, name in enumerate(names):
                change = {"metadata": {"annotations": {name: str(number)}}}
                await other.patch(NODES, NODE, change, PatchType.MERGE, Node)
                agent.reports.vgpus.set(Progress(StateName.PENDING, f"step {number}"))

        await write_others()
        agent.reports.vgpus.set(SUCCESS)
        await until(lambda: api.node_field(STATE) == "success", lambda: agent)
        node = await other.get(NODES, NODE, Node)
        assert {name: node.metadata.annotations[name] for name in names} == {
            name: str(number) for number, name in enumerate(names)
        }
        assert REASON_ANNOTATION not in node.metadata.annotations
        assert agent.problems == {}


async def test_a_stale_update_is_a_conflict_and_a_missing_node_is_not_found(api: ApiLab) -> None:
    client = admin(api)
    fields = await client.get(NODES, NODE, dict[str, msgspec.Raw])
    api.label("example.com/changed=yes")
    with pytest.raises(ConflictError):
        await client.update(NODES, NODE, fields, Node)
    with pytest.raises(NotFoundError):
        await client.get(NODES, "no-such-node", Node)


async def test_a_missing_gpunode_kind_is_observed(api: ApiLab) -> None:
    async with following(api.credentials, gpu_nodes=True) as agent:
        await until(lambda: agent.kind_exists is False, lambda: agent.problems)
