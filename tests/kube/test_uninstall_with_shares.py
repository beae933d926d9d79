"""An uninstall while pods have shares of GPUs, or VgpuSchedules have cordoned nodes: it may change nothing."""

import json
from collections.abc import Mapping, Sequence
from importlib import metadata

import pytest

from gpuvirt.controller.install.uninstall import Goals, SharesInUseError, Uninstaller
from gpuvirt.distributions import MissingPartError
from gpuvirt.kube.labels import NODE_LABEL
from gpuvirt.model.shares.annotations import SHARES_ANNOTATION
from gpuvirt.model.workers.spec import CORDONED_BY
from tests.kube.contestedlease import Hasty, Peer, election, serving
from tests.kube.scriptedapi import Call, Reply
from tests.web.certificates import Authority, Pair

ON_A = '{"containers":{"main":{"GPU-a":300}}}'


class Api:
    """An API server with an agent on node01, and pods."""

    def __init__(self, *pods: tuple[str, str, str]) -> None:
        self.peer = Peer(0)
        self.labels = {NODE_LABEL: "true"}
        self.pods = [
            {
                "metadata": {"name": name, "namespace": "ns", "uid": name, "annotations": {SHARES_ANNOTATION: shares}},
                "spec": {"nodeName": node},
            }
            for name, node, shares in pods
        ]

    def answer(self, call: Call) -> Reply:
        if call.method == "PATCH":
            for key in json.loads(call.body)["metadata"]["labels"]:
                self.labels.pop(key, None)
        node = {"metadata": {"name": "node01", "labels": self.labels}}
        found: Mapping[str, Sequence[object]] = {"/api/v1/nodes": [node], "/api/v1/pods": self.pods}
        if call.method == "PATCH":
            return 200, node
        if call.path in found:
            return 200, {"metadata": {"resourceVersion": "1"}, "items": found[call.path]}
        return self.peer.answer(call)


async def uninstalled(api: Api, authority: Authority, server: Pair, *, force: bool = False) -> list[str]:
    async with serving(api.answer, server, authority.certificate) as (served, client):
        uninstaller = Uninstaller(client, Goals("gpuvirt", force=force), Hasty(), election(client, "uninstall-host"))
        try:
            return [line async for line in uninstaller.run()]
        except (MissingPartError, SharesInUseError):
            assert {call.method for call in served.calls} == {"GET"}, "nothing was changed"
            raise


async def test_pods_with_shares_refuse_an_uninstall_and_are_named(authority: Authority, server: Pair) -> None:
    api = Api(("b", "node01", ON_A), ("a", "node01", ON_A), ("none", "node01", ""), ("other", "node02", ON_A))
    with pytest.raises(
        SharesInUseError, match=r"node01: ns/a, ns/b\. Nothing was removed\. Label these nodes .*--force"
    ):
        await uninstalled(api, authority, server)


async def test_an_uninstall_by_force_names_the_pods_and_goes_on(authority: Authority, server: Pair) -> None:
    api = Api(("a", "node01", ON_A))
    lines = await uninstalled(api, authority, server, force=True)
    assert lines[0] == "pods keep their shares of GPUs, and their containers do not start again: node01: ns/a"
    assert "node node01: removed gpuvirt.io/node" in lines[2]


async def test_pods_without_an_agent_of_the_controller_refuse_nothing(authority: Authority, server: Pair) -> None:
    api = Api(("a", "node02", ON_A))
    assert (await uninstalled(api, authority, server))[0] == "no controller leads for 10 minutes"
    api = Api(("a", "node01", ON_A))
    await uninstalled(api, authority, server, force=True)
    assert (await uninstalled(api, authority, server))[0] == "no controller leads for 10 minutes", "again, later"


async def test_nodes_that_schedules_have_cordoned_need_the_distribution_of_schedules(
    authority: Authority, server: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    api = Api()
    assert (await uninstalled(api, authority, server))[0] == "no controller leads for 10 minutes"
    api.labels[CORDONED_BY] = "gpus"
    with pytest.raises(MissingPartError, match=r"schedules needs gpuvirt-schedules .*, which is not installed"):
        await uninstalled(api, authority, server)
