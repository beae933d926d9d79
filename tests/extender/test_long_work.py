"""A pod with many arrangements gets bounded work, and holds up no request about another pod."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.extender.extender import PART, LongWork
from gpuvirt.extender.filtering import MOST_STEPS, filtered, prioritized
from gpuvirt.extender.preempting import preempted
from gpuvirt.extender.protocol import NodeArguments, PreemptionArguments, Victims
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.shares.placement import Steps, finished
from gpuvirt.shares.sharing import Sharing
from tests.extender.podapi import PodApi
from tests.extender.pods import IndexUnderTest, N, budgets_of, decoded_pod, index_of, node, pod
from tests.extender.processes import bind, is_ready, post, running, until

UNITS = range(335, 352)
"""17 containers: of 8 GPUs, 7 have room for two of them each, and 3 more stay without."""
BIG = pod("big", *UNITS)
NAMES = [NodeName(f"n{number}") for number in range(400)]
TOO_COMPLEX = (
    "nvidia.com/vgpu: TooComplex: 17 containers request units, which have too many arrangements on the GPUs to try, and"
    " the first one does not fit; use at most 16 containers with units, or request fewer units"
)


@pytest.fixture(scope="module")
def cluster() -> IndexUnderTest:
    """400 nodes, each with other pieces."""
    return index_of(node(name, **gpus(300 + number)) for number, name in enumerate(NAMES))


def gpus(last: int) -> dict[str, int]:
    return {**{f"g{number}": 1000 for number in range(7)}, "last": min(last, 669)}


@pytest.mark.parametrize("containers", [17, 16], ids=["without a search", "with searches"])
def test_the_work_of_a_request_is_bounded(cluster: IndexUnderTest, containers: int) -> None:
    asked = NodeArguments(decoded_pod(pod("big", *list(UNITS)[:containers])), NAMES)
    steps, rows = Steps(MOST_STEPS), cluster.index.usage.rows
    answer = filtered(asked, rows, Sharing(), (), steps=steps)
    assert not answer.node_names
    assert all("TooComplex" in text for text in answer.failed_and_unresolvable_nodes.values())
    a_node = 2 * containers + 10
    assert -a_node * len(NAMES) <= steps.left < MOST_STEPS
    steps.left = MOST_STEPS
    assert {priority.score for priority in finished(prioritized(asked, rows, Sharing(), steps))} == {0}
    assert -a_node * len(NAMES) <= steps.left < MOST_STEPS


def test_a_pod_of_which_it_is_not_known_whether_it_fits_says_so() -> None:
    found = index_of([node("n", **gpus(500)), node("m", a=1000, b=1000)])
    asked = NodeArguments(decoded_pod(BIG), [N, NodeName("m")])
    answer = filtered(asked, found.index.usage.rows, Sharing(), ())
    assert answer.failed_and_unresolvable_nodes == {
        "n": TOO_COMPLEX,
        "m": "nvidia.com/vgpu: 5831 (by 17 containers) units requested, the node's largest GPU has 1000",
    }


def test_the_work_for_victims_is_bounded() -> None:
    """No search finds out whether the pod would fit without the others."""
    shares = [{f"g{number}": 1} for number in range(7)]
    on_nodes = [pod(f"{name}-{number}", 1, on=name, gpus=[gpu]) for name in NAMES for number, gpu in enumerate(shares)]
    found = index_of([node(name, **gpus(669)) for name in NAMES], on_nodes)
    victims = {name: Victims([PodUid(f"uid-{name}-0")]) for name in NAMES}
    asked = PreemptionArguments(decoded_pod(pod("big", *list(UNITS)[:16], priority=9)), victims)
    steps = Steps(20_000)
    searched = preempted(asked, found.index, budgets_of(), Sharing(), steps, lambda: False)
    assert finished(searched) == {}
    assert -10_000 < steps.left <= 0


async def test_other_work_comes_between_the_parts() -> None:
    """A part ends once its steps exceed the limit; in one turn of the event loop, one work at most does a part."""
    clock, done = RealClock(), list[str]()

    def work(name: str, steps: Steps) -> Generator[None, None, str]:
        for _ in range(3):
            done.append(name)
            steps.left -= PART
            yield
        return name

    async def count() -> None:
        while True:
            done.append("-")
            await clock.sleep(0)

    async def do(name: str) -> None:
        steps = Steps(MOST_STEPS)
        assert await long_work.result(work(name, steps), steps) == name

    long_work = LongWork(clock)
    async with asyncio.TaskGroup() as group:
        counter = group.create_task(count())
        await asyncio.wait([group.create_task(do(name)) for name in "ab"])
        counter.cancel()
    parts = "".join(done).split("-")
    assert sorted("".join(parts)) == list("aaabbb")
    assert max(len(part) for part in parts[2:]) == 1, "each did its first part at once"


async def test_small_pods_are_answered_beside_pods_with_many_arrangements(tmp_path: Path) -> None:
    """Each request for a big pod takes as many steps as one may, and small pods are filtered meanwhile."""
    api = PodApi()
    for number, name in enumerate(NAMES):
        api.put("nodes", node(name, **gpus(300 + number)))
    async with running(api, tmp_path) as processes, asyncio.TaskGroup() as group:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        big = [
            group.create_task(post(process, "filter", Pod=pod(f"big{number}", *list(UNITS)[:16]), NodeNames=NAMES))
            for number in range(4)
        ]
        for number in range(3):
            answer = await post(process, "filter", Pod=pod(f"small{number}", 300), NodeNames=NAMES)
            assert answer["NodeNames"] == NAMES
            assert not any(task.done() for task in big)
        assert all("TooComplex" in str(answer) for answer in await asyncio.gather(*big))


async def test_a_binding_that_is_undecided_is_refused(tmp_path: Path) -> None:
    api = PodApi()
    api.put("nodes", node("n", **gpus(500)))
    api.put("pods", BIG)
    async with running(api, tmp_path) as processes:
        process = await processes.start(elects=False)
        await until(lambda: is_ready(process))
        assert "pod default/big is not bound to node n: TooComplex: 17 containers" in str(await bind(process, "big"))
