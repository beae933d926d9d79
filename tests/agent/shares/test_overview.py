"""The overview of shared GPUs has each GPU's pods, what is free, and the largest piece; its table fits 80 columns."""

import re
from collections.abc import Mapping

import pytest
from rich.console import Console

from gpuvirt.cli.output.fleetrender import bar, print_shares
from gpuvirt.facts.ids import NodeName, PodUid
from gpuvirt.model.desired.settings import Enforcement
from gpuvirt.model.shares.demand import Units
from gpuvirt.model.shares.nodeusage import NodeUsage
from gpuvirt.model.shares.overview import GpuOverview, PodShare, SharesOverview, overview, short_ids
from gpuvirt.model.shares.placement import GpuId, Shares

A, B = GpuId("GPU-8a5c31f2-0000-0000-0000-000000000001"), GpuId("GPU-8a5c31f2-0000-0000-0000-000000000002")


def shares(**units: int) -> Shares:
    return {{"a": A, "b": B}[name]: Units(number) for name, number in units.items()}


def overview_of(
    capacity: Shares, placed: Mapping[str, Shares], unplaced: Mapping[str, int] | None = None
) -> SharesOverview:
    usage, pods = NodeUsage(), dict[PodUid, PodShare]()
    usage = usage.with_capacity(capacity)
    for name, used in placed.items():
        total = Units(sum(used.values()))
        usage = usage.with_pod(PodUid(name), used, total)
        pods[PodUid(name)] = PodShare(f"research/{name}", total)
    for name, units in (unplaced or {}).items():
        usage = usage.with_pod(PodUid(name), None, Units(units))
        pods[PodUid(name)] = PodShare(f"research/{name}", units)
    return overview({NodeName("node01"): usage}, pods)


def printed(found: SharesOverview, width: int = 80) -> str:
    out = Console(width=width, highlight=False, markup=False, emoji=False)
    with out.capture() as capture:
        print_shares(out, found)
    return capture.get()


def test_each_gpu_has_its_pods_and_what_is_free() -> None:
    found = overview_of(shares(a=1000, b=1000), {"train": shares(a=700), "serve": shares(a=200, b=100)})
    (node,) = found.nodes
    assert [(gpu.gpu, gpu.used, gpu.free) for gpu in node.gpus] == [(A, 900, 100), (B, 100, 900)]
    assert node.gpus[0].pods == (PodShare("research/serve", 200), PodShare("research/train", 700))
    assert (node.largest, found.units, found.used, found.free, found.gpus) == (900, 2000, 1000, 1000, 2)


def test_a_pod_whose_gpus_are_unknown_counts_on_each_gpu() -> None:
    (node,) = overview_of(shares(a=1000, b=1000), {}, {"lost": 300}).nodes
    assert [(gpu.used, gpu.free) for gpu in node.gpus] == [(0, 700), (0, 700)]
    assert node.unplaced == (PodShare("research/lost", 300),)
    text = " ".join(printed(overview_of(shares(a=1000), {}, {"lost": 300})).split())
    assert "count on each GPU of node01: research/lost 300" in text


def test_a_gpu_that_is_no_longer_shared_is_listed_with_its_pods() -> None:
    (node,) = overview_of(shares(b=1000), {"train": shares(a=300)}).nodes
    assert [(gpu.gpu, gpu.units, gpu.used, gpu.free) for gpu in node.gpus] == [(A, 0, 300, 0), (B, 1000, 0, 1000)]


def test_a_cluster_without_shared_gpus_says_how_to_share_them() -> None:
    assert "mode shared" in printed(overview({}, {}))


def test_the_table_fits_80_columns_and_cuts_nothing() -> None:
    text = printed(overview_of(shares(a=1000, b=1000), {f"training-job-{n}": shares(a=50) for n in range(9)}))
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"research/training-job-{n} 50" in " ".join(text.split()) for n in range(9))
    assert "the largest free piece has 1000 units" in text


def test_the_table_says_which_shares_are_limits() -> None:
    def table(*pods: tuple[str, str]) -> str:
        usage, names = NodeUsage(), dict[PodUid, PodShare]()
        usage = usage.with_capacity(shares(a=1000, b=1000))
        for name, enforcement in pods:
            usage = usage.with_pod(PodUid(name), shares(a=100), Units(100))
            names[PodUid(name)] = PodShare(f"research/{name}", 100, enforcement)
        return printed(overview({NodeName("node01"): usage}, names), 120)

    limited, plain = table(("p", "hami-core")), table(("p", "none"))
    assert re.search(r"900 +hami-core +research/p 100", limited)
    assert "Each share has a limit" in limited
    assert re.search(r"900 +none +research/p 100", plain)
    assert "nothing keeps a container" in plain
    assert "nothing keeps a container" in table(), "on a node without pods"
    mixed = table(("p", "hami-core"), ("q", "none"))
    assert "1 hami-core, 1 none" in mixed
    assert "Pods without a limit can use more" in mixed
    both = table(("p", "hami-core"), ("q", "mps"))
    assert "1 hami-core, 1 mps" in both
    assert "Each share has a limit" in both


@pytest.mark.parametrize(
    ("used", "says"),
    [((4000, 3000), "7000 of 9830 MiB"), ((4000, None), "4000+ of 9830 MiB"), ((None, None), "? of 9830 MiB")],
)
def test_the_table_has_the_memory_that_pods_with_limits_use(used: tuple[int | None, int | None], says: str) -> None:
    usage, names = NodeUsage(), dict[PodUid, PodShare]()
    usage = usage.with_capacity(shares(a=1000, b=1000))
    for number, memory in enumerate(used):
        name = PodUid(f"train-{number}")
        usage = usage.with_pod(name, shares(a=300), Units(300))
        names[name] = PodShare(f"research/{name}", 300, "hami-core", limit_mib=4915, used_mib=memory)
    found = overview({NodeName("node01"): usage}, names)
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    assert f"USED: {says}" in text
    assert says in " ".join(printed(found, 140).split())
    assert re.search(r"1000 +- +- *$", printed(found, 140), re.MULTILINE), "of the GPU without pods"


def test_a_cluster_without_limits_has_no_column_for_memory() -> None:
    assert "USED" not in printed(overview_of(shares(a=1000), {"train": shares(a=300)}))


def test_ids_are_shortened_to_what_distinguishes_them() -> None:
    assert short_ids([A]) == {A: "GPU-8a5c31f2"}
    assert len(set(short_ids([A, B]).values())) == 2
    assert short_ids([]) == {}


def test_a_bar_is_empty_or_full_only_for_an_empty_or_full_gpu() -> None:
    cells = {used: bar(GpuOverview(A, 1000, used, 1000 - used, ())).plain for used in (0, 1, 500, 999, 1000)}
    assert len({text[0] for text in cells.values()}) == 2
    assert [text.count(cells[1000][0]) for text in cells.values()] == [0, 1, 5, 9, 10]
    assert bar(GpuOverview(A, 0, 0, 0, ())).plain == "-"
    assert bar(GpuOverview(A, 0, 300, 0, ())).plain == cells[1000]


@pytest.mark.parametrize(("began", "now"), [("none", "hami-core"), ("hami-core", "none"), ("hami-core", "mps")])
def test_a_node_with_pods_of_other_limits_says_what_new_pods_get(began: str, now: str) -> None:
    gpu, name, pod = GpuId("GPU-aaaaaaaa"), NodeName("node01"), PodUid("p")
    usage = NodeUsage()
    usage = usage.with_capacity({gpu: Units(1000)})
    usage = usage.with_pod(pod, {gpu: Units(300)}, Units(300))
    pods = {pod: PodShare("default/p", 300, began)}
    found = overview({name: usage}, pods, limiting={name: Enforcement(now)})
    assert found.nodes[0].enforcement == now
    assert f"new pods of node01: {now}" in printed(found)
    assert "new pods of" not in printed(overview({name: usage}, pods, limiting={name: Enforcement(began)}))
