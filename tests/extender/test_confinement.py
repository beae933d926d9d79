"""Pods that require limits, and in which none can hold: they are refused with the reason."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gpuvirt.clock import RealClock
from gpuvirt.model.reasons import ReasonCode
from gpuvirt.shares.confinement import ConfinedPod, why_unconfined
from gpuvirt.shares.sharing import Sharing
from tests.extender.podapi import PodApi
from tests.extender.pods import Object, node, pod
from tests.extender.processes import is_ready, post, running, until

HANDLERS = {"nvidia": "nvidia", "gvisor": "runsc", "kata": "kata-qemu"}
PRIVILEGED: Object = {"privileged": True}
ADMIN: Object = {"capabilities": {"add": ["SYS_ADMIN"]}}


def with_rights(rights: Object, units: int = 300, enforcement: str = "required", **spec: object) -> Object:
    """Return a pod with one container of these rights; `spec` has more fields of its spec."""
    content = pod("p", units, enforcement=enforcement)
    own = msgspec.convert(content["spec"], dict[str, object])
    (container,) = msgspec.convert(own["containers"], list[dict[str, object]])
    containers = [{**container, "securityContext": rights}]
    return {**content, "spec": {**own, "initContainers": [], "containers": containers, **spec}}


def why(content: Object, handlers: dict[str, str] | None = HANDLERS) -> str:
    reason = why_unconfined(msgspec.convert(content, ConfinedPod), Sharing(), handlers)
    assert reason is None or reason.code in {ReasonCode.NO_LIMIT_HOLDS, ReasonCode.ANNOTATION_INVALID}
    return reason.text if reason is not None else ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (with_rights(PRIVILEGED), "its container c0 is privileged"),
        (with_rights({}, initContainers=[{"name": "i", "securityContext": PRIVILEGED}]), "container i is privileged"),
        (with_rights(ADMIN, hostPID=True), "its container c0 has hostPID and SYS_ADMIN"),
        (with_rights({"capabilities": {"add": ["ALL"]}}, hostPID=True), "its container c0 has hostPID and SYS_ADMIN"),
        (with_rights({}, runtimeClassName="gvisor"), "is runsc, in which no limit is known to hold"),
        (with_rights({}, runtimeClassName="kata"), "is kata-qemu, in which no limit is known to hold"),
        (with_rights({}, runtimeClassName="gone"), "is not known"),
    ],
)
def test_a_pod_in_which_no_limit_can_hold_is_told_why(content: Object, expected: str) -> None:
    assert expected in why(content)


@pytest.mark.parametrize(
    "content",
    [
        with_rights({}),
        with_rights({"privileged": False}, hostPID=True),
        with_rights(ADMIN),
        with_rights({}, runtimeClassName="nvidia"),
        with_rights(PRIVILEGED, enforcement=""),
        with_rights(PRIVILEGED, units=1000),
        with_rights(PRIVILEGED, units=1500),
    ],
)
def test_pods_that_can_have_a_limit_or_need_none_are_judged_by_their_nodes(content: Object) -> None:
    assert why(content) == ""


def test_while_the_runtime_classes_are_not_known_no_pod_of_one_has_a_limit() -> None:
    assert "is not known" in why(with_rights({}, runtimeClassName="nvidia"), None)
    assert why(with_rights({}), None) == ""


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("gpuvirt.io/enforcment", "required", "gpuvirt.io/enforcment: unknown; did you mean gpuvirt.io/enforcement?"),
        ("gpuvirt.io/x", "", "gpuvirt.io/x: unknown; expected gpuvirt.io/enforcement, gpuvirt.io/memory, "),
        ("gpuvirt.io/enforcement", "Required", "'Required'; expected required, or no annotation"),
        ("gpuvirt.io/memory", "Soft", "'Soft'; expected soft, or no annotation"),
        ("gpuvirt.io/shares-policy", "widest", "'widest'; expected binpack or spread, or no annotation"),
        ("gpuvirt.io/memory", "", ""),
        ("example.com/enforcment", "required", ""),
    ],
)
def test_an_annotation_that_means_nothing_is_no_request_without_a_limit(key: str, text: str, expected: str) -> None:
    found = why({**with_rights({}, enforcement=""), "metadata": {"name": "p", "annotations": {key: text}}})
    assert expected in found
    assert bool(found) == bool(expected)


async def test_the_extender_places_such_a_pod_nowhere(tmp_path: Path) -> None:
    api = PodApi()
    api.put("nodes", node("n", "mps", a=1000))
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))

        async def refusal(content: Object) -> str:
            answer = await post(process, "filter", Pod=content, NodeNames=["n"])
            return str(answer["FailedAndUnresolvableNodes"]) if answer["NodeNames"] == [] else "none"

        async def until_answered(content: Object, expected: str) -> None:
            async with asyncio.timeout(30):
                while expected not in await refusal(content):
                    await RealClock().sleep(0.01)

        assert "NoLimitHolds: pod default/p requires an enforced share" in await refusal(with_rights(PRIVILEGED))
        sandboxed = with_rights({}, runtimeClassName="sandbox")
        assert "is not known" in await refusal(sandboxed)
        for handler, expected in (("crun", "none"), ("runsc", "is runsc, in which")):
            api.put("runtimeclasses", {"metadata": {"name": "sandbox", "uid": "uid-sandbox"}, "handler": handler})
            await until_answered(sandboxed, expected)
