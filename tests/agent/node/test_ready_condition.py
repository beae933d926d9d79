"""The condition Ready of a GpuNode: its reasons are short, and those that end by themselves in seconds come last."""

from collections.abc import Sequence

from gpuvirt.agent.cluster.gpunode import status_of
from gpuvirt.kube.kinds.gpunode import READY, GpuNode
from gpuvirt.kube.kinds.parts import Condition
from gpuvirt.kube.resources import Metadata
from gpuvirt.model.offers.view import NodeView
from gpuvirt.model.reasons import Reason, ReasonCode, refusals, shortfalls
from gpuvirt_sim.clock import BEGINNING

COUNTED = [
    refusals.still_counted(f"vgpu-{number}", ["nvidia.com/T4-8Q"], "is no longer desired") for number in "abcdef"
]
IN_USE = [shortfalls.still_used(f"vgpu-{number}", f"stays while it is in use: pod default/{number}") for number in "xy"]


def ready(*problems: Reason) -> Condition:
    view = NodeView(at=BEGINNING, problems=problems)
    status = status_of(view, GpuNode(metadata=Metadata(name="node01")), BEGINNING)
    return next(condition for condition in status.conditions if condition.type == READY)


def parts(condition: Condition) -> Sequence[str]:
    return condition.message.split(" | ")


def test_a_reason_of_several_devices_is_written_once() -> None:
    (text,) = parts(ready(*COUNTED))
    assert text == f"{COUNTED[0].text}; also: vgpu-b, vgpu-c, vgpu-d and 2 more"
    assert parts(ready(*COUNTED[:2])) == [f"{COUNTED[0].text}; also: vgpu-b"]
    assert parts(ready(COUNTED[0], COUNTED[0])) == [COUNTED[0].text]


def test_reasons_with_different_words_are_all_written() -> None:
    assert parts(ready(*IN_USE)) == [reason.text for reason in IN_USE]


def test_what_ends_by_itself_in_seconds_comes_last() -> None:
    lasting = refusals.failed("unbind", "0000:3b:00.0")
    found = ready(*COUNTED, *IN_USE, lasting)
    assert found.reason == ReasonCode.VGPU_IN_USE
    assert [text.partition(":")[0] for text in parts(found)] == [
        "VgpuInUse",
        "VgpuInUse",
        "StepFailed",
        "StillAllocatable",
    ]
