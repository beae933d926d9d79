"""A part that is decided from the last is the part that is decided from scratch, whatever has changed."""

import dataclasses

import pytest
from msgspec.structs import replace

from gpuvirt.facts.ids import VgpuType
from gpuvirt.facts.snapshot import Facts
from gpuvirt.facts.vgpu import Framework
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.observed import ConfigText, GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.devices.candidates import Candidate
from gpuvirt.model.inventory.inventory import build_inventory
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.node.memo import CacheKey, Memoized, memoized
from gpuvirt.model.node.parts import NamedCandidates, Parts, candidates_part
from gpuvirt.model.node.picture import NodePicture
from gpuvirt.model.offers.offermaking import Candidates
from tests.agent.life.life import A10, T4
from tests.agent.node.pictures import a10_unplugged, as_built, decided_at, desiring, facts_of, observed
from tests.agent.node.simnode import IDS

FACTS = facts_of(as_built)
NAMING = Naming(IDS)


def found_of(facts: Facts, last: Memoized[NamedCandidates] | None, naming: Naming = NAMING) -> Candidates:
    inventory = build_inventory(facts.after(FACTS))
    return candidates_part(last, inventory, naming, Settings()).value.candidates


LAST = candidates_part(None, build_inventory(FACTS), NAMING, Settings())
LAST_FOUND = LAST.value.candidates


@pytest.mark.parametrize(
    ("same", "equal", "is_taken"),
    [(0, ("a", 1), True), (0, ("a", 2), False), (1, ("a", 1), False)],
)
def test_a_value_is_taken_over_only_where_it_follows_from_the_same(
    same: int, equal: tuple[object, ...], *, is_taken: bool
) -> None:
    """Of the first inputs equal ones are not the same; the others are compared."""
    inputs = [[1], [1]]
    last = Memoized(CacheKey((inputs[0],), ("a", 1)), "last")
    found = memoized(last, CacheKey((inputs[same],), equal), lambda: "now")
    assert (found is last) is is_taken
    assert found.value == ("last" if is_taken else "now")


def texts(candidates: Candidates) -> list[str]:
    """Return the candidates with the types of their vGPUs, which do not count in comparisons."""
    return [repr(candidate) for candidate in candidates]


def with_gpu(**values: object) -> Facts:
    functions = {**FACTS.functions, T4: replace(FACTS.functions[T4], **values)}
    return replace(FACTS, functions=functions)


def with_vgpu_host(**values: object) -> Facts:
    hosts = {**FACTS.vgpu_hosts, T4: replace(FACTS.vgpu_hosts[T4], **values)}
    return replace(FACTS, vgpu_hosts=hosts)


def moved() -> Facts:
    """Return the facts in which another GPU carries the same vGPUs."""
    host = FACTS.vgpu_hosts[T4]
    return replace(FACTS, vgpu_hosts={T4: replace(host, live=()), A10: replace(host, gpu=A10)})


LIVE = FACTS.vgpu_hosts[T4].live


@pytest.mark.parametrize(
    "facts",
    [
        with_gpu(numa_node=7),
        with_vgpu_host(live=tuple(replace(vgpu, type=VgpuType("GRID T4-4Q")) for vgpu in LIVE)),
        with_vgpu_host(framework=Framework.VENDOR_VFIO),
        with_vgpu_host(live=LIVE[1:]),
        moved(),
    ],
    ids=["its GPU", "its type", "its framework", "removed", "on another GPU"],
)
def test_a_vgpu_that_has_changed_is_another_candidate(facts: Facts) -> None:
    found = found_of(facts, LAST)
    assert texts(found) == texts(found_of(facts, None))
    assert texts(found) != texts(LAST_FOUND), "the test changes nothing"


def test_a_vgpu_has_another_name_where_names_have_changed() -> None:
    naming = replace(NAMING, aliases={"GRID_T4-8Q": "t4"})
    found = found_of(FACTS, LAST, naming)
    assert texts(found) == texts(found_of(FACTS, None, naming))
    assert texts(found) != texts(LAST_FOUND), "the test changes nothing"


def test_a_vgpu_that_has_not_changed_is_the_candidate_from_before() -> None:
    functions = {**FACTS.functions, A10: replace(FACTS.functions[A10], numa_node=7)}
    found = found_of(replace(FACTS, functions=functions), LAST)
    before = {id(candidate) for candidate in LAST_FOUND}
    vgpus = [candidate for candidate in found if isinstance(candidate, Candidate) and candidate.target.vgpu]
    assert len(vgpus) == len(LIVE)
    assert {id(vgpu) for vgpu in vgpus} <= before


def config(picture: NodePicture, types: str, name: str = "some") -> NodePicture:
    """Return the picture with a vGPU config of one type and number in a text."""
    text = f"version: v1\nvgpu-configs:\n  {name}:\n    - devices: all\n      vgpu-devices: {{{types}}}\n"
    spec = GpuNodeSpec(str(DesiredMode.VGPU), {}, name)
    return replace(picture, request=NodeRequest(configs=Observed(ConfigText(text, "text")), spec=Observed(spec)))


PICTURE = observed()


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (config(PICTURE, '"T4-8Q": 2'), config(PICTURE, '"T4-4Q": 4')),
        (desiring(PICTURE, DesiredMode.VGPU, "T4-8Q"), desiring(PICTURE, DesiredMode.VGPU, "T4-4Q")),
        (desiring(PICTURE, DesiredMode.CONTAINER), desiring(PICTURE, DesiredMode.VGPU, "T4-4Q")),
        (config(observed(a10_unplugged), '"T4-8Q": 2'), config(PICTURE, '"T4-8Q": 2')),
    ],
    ids=["text", "name", "mode", "GPU"],
)
def test_vgpus_are_planned_as_from_scratch(before: NodePicture, now: NodePicture) -> None:
    last = decided_at(before)
    vgpus = decided_at(now, 1.0, last.memory).desired.vgpus
    assert vgpus == decided_at(now, 1.0, dataclasses.replace(last.memory, parts=Parts())).desired.vgpus
    assert vgpus != last.desired.vgpus, "the test changes nothing"


def test_a_gpu_that_shares_time_no_more_has_no_scheduler() -> None:
    last = decided_at(desiring(PICTURE, DesiredMode.VGPU, "T4-8Q"))
    assert T4 in last.desired.vgpus.time_shared
    other_driver = replace(PICTURE, inventory=build_inventory(with_gpu(driver="vfio-pci").after(FACTS)))
    now = decided_at(desiring(other_driver, DesiredMode.VGPU, "T4-8Q"), 1.0, last.memory)
    assert T4 not in now.desired.vgpus.time_shared
