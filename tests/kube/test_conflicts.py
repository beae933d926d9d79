"""With concurrent writers, each write is retried from a fresh read."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.controller.install.uninstall import Goals, Uninstaller
from gpuvirt.kube.election import Candidacy, Election, Terms
from gpuvirt.kube.failures import MOST_TRIES, ApiError, ConflictError, ForbiddenError, retried
from tests.agent.kubelet.kubeletnode import until
from tests.kube.contestedlease import LEASE, LEASES, Hasty, Object, Peer, election, serving
from tests.kube.scriptedapi import CONFLICT, Call, Reply
from tests.web.certificates import Authority, Pair


@pytest.mark.parametrize("existing", [True, False])
async def test_an_uninstall_acquires_a_lease_that_the_leader_renews_meanwhile(
    authority: Authority, server: Pair, existing: bool
) -> None:
    objects: dict[str, Object] = (
        {LEASE: {"metadata": {"name": "gpuvirt-controller", "resourceVersion": "1"}}} if existing else {}
    )
    peer = Peer(3, objects)
    async with serving(peer.answer, server, authority.certificate) as (api, client):
        uninstaller = Uninstaller(client, Goals("gpuvirt"), Hasty(), election(client, "uninstall-host"))
        lines = [line async for line in uninstaller.run()]
    assert lines[0] == "no controller leads for 10 minutes"
    assert peer.objects[LEASE]["spec"]["holderIdentity"] == "uninstall-host"
    assert [call.method for call in api.calls if call.path in {LEASE, LEASES}][:8] == (
        ["GET", "PUT"] * 4 if existing else ["GET", "POST", *["GET", "PUT"] * 3]
    )


async def test_a_leader_releases_its_lease_despite_concurrent_writes(authority: Authority, server: Pair) -> None:
    peer = Peer(0)

    async def lead() -> None:
        peer.relabels = 2
        raise RuntimeError("leading fails")

    async with serving(peer.answer, server, authority.certificate) as (_, client):
        with pytest.raises(BaseExceptionGroup):
            await election(client, "me").run(lead)
    assert peer.relabels == 0
    assert peer.objects[LEASE]["spec"]["holderIdentity"] == ""


@pytest.mark.parametrize("holder", ["me", "other"])
async def test_a_leader_renews_by_one_request_and_reads_the_lease_if_another_has_written_it(
    authority: Authority, server: Pair, holder: str
) -> None:
    peer = Peer(0)
    kept: Object = {"metadata": {"name": "gpuvirt-controller"}, "spec": {"holderIdentity": holder}}
    ended = asyncio.Event()

    async def lead() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    terms = Terms(renew_s=0.01)
    async with (
        serving(peer.answer, server, authority.certificate) as (api, client),
        asyncio.TaskGroup() as group,
    ):
        candidacy = Candidacy("gpuvirt", "gpuvirt-controller", "me", terms)
        elected = Election(client, candidacy, RealClock(), Random(1))  # noqa: S311  a jitter
        running = group.create_task(elected.run(lead))
        await until(lambda: len(api.calls) > 10)
        assert [call.method for call in api.calls[:8]] == ["GET", "POST", *["PUT"] * 6]
        peer.write(kept)
        before = len(api.calls)
        await until(lambda: len(api.calls) > before + 4)
        if holder == "other":
            await ended.wait()
            assert not elected.may_write
        else:
            assert elected.may_write
            assert sum(call.method == "GET" for call in api.calls) == 2, "only after the write of the other"
        running.cancel()


async def test_an_object_recreated_during_an_uninstall_is_deleted_too(authority: Authority, server: Pair) -> None:
    """A DaemonSet that a controller makes again between a list and a deletion."""
    sets = "/apis/apps/v1/namespaces/gpuvirt/daemonsets"
    existing = {"uid": "old"}

    def answer(call: Call) -> Reply:
        if call.path == f"{sets}/gpuvirt-node" and call.method == "DELETE":
            asked = json.loads(call.body)["preconditions"]["uid"]
            if asked == "old":
                existing["uid"] = "new"
                return CONFLICT
            existing.clear()
            return 200, {}
        if call.path == sets and call.method == "GET":
            items = [{"metadata": {"name": "gpuvirt-node", **existing, "labels": {"a": "b"}}}] if existing else []
            return 200, {"metadata": {}, "items": items if "operand" in call.target else []}
        return Peer.answer(peer, call)

    peer = Peer(0)
    async with serving(answer, server, authority.certificate) as (_, client):
        uninstaller = Uninstaller(client, Goals("gpuvirt"), Hasty(), election(client, "uninstall-host"))
        lines = [line async for line in uninstaller.run()]
    assert "deleted daemonsets gpuvirt-node" in lines
    assert not existing


def failing(times: int, error: ApiError) -> tuple[list[int], Callable[[], Awaitable[str]]]:
    tries: list[int] = []

    async def attempt() -> str:
        tries.append(len(tries))
        if len(tries) <= times:
            raise error
        return "done"

    return tries, attempt


async def test_a_persistent_conflict_is_reported_and_any_other_error_at_once() -> None:
    tries, attempt = failing(MOST_TRIES - 1, ConflictError("x"))
    assert (await retried(attempt, Hasty()), len(tries)) == ("done", MOST_TRIES)
    tries, attempt = failing(MOST_TRIES, ConflictError("the object has been modified"))
    with pytest.raises(ConflictError, match="has been modified"):
        await retried(attempt, Hasty())
    assert len(tries) == MOST_TRIES
    tries, attempt = failing(1, ForbiddenError("x"))
    with pytest.raises(ForbiddenError):
        await retried(attempt, Hasty())
    assert len(tries) == 1
