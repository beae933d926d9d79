"""A new resource waits for the controller's word on its name; what was offered before goes on as the disk says."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import NodeRequest, NodeSpec, Observed, Withheld
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.node.known.namereview import NameReview
from gpuvirt.sim.clock import SimClock
from gpuvirt.sim.kernel import SimKernel
from tests.simnode import SimNode, running_node
from tests.simulated import Simulated
from tests.thoroughness import examples

A10 = ResourceName("nvidia.com/GA102GL_A10")
BOUND_S = 30.0


def reviewed(*names: str, withheld: tuple[Withheld, ...] = ()) -> NodeRequest:
    return NodeRequest(spec=Observed(NodeSpec("unmanaged", withheld=withheld, reviewed=names)))


FOREIGN = Withheld(A10, "ForeignProvider", "is offered by KubeVirt itself")


def notes(node: SimNode) -> list[Reason]:
    return [note for note in node.view.notes if note.code is ReasonCode.CONTROLLER_SILENT]


def registers(node: SimNode, name: ResourceName = A10) -> bool:
    """Return whether the plugins would register a resource."""
    return any(one.name == name and one.devices and not one.withheld for one in node.view.resources)


def controlled(kernel: SimKernel, folder: Path) -> AbstractAsyncContextManager[SimNode]:
    return running_node(kernel, folder, hears_spec=True, awaits_controller=True)


async def test_a_new_resource_waits_for_its_review_and_says_so(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        node.agent.take_request(NodeRequest(spec=Observed(None)))
        await node.advance(10)
        (resource,) = node.view.resources
        assert (resource.devices, resource.withheld) == ((), True)
        assert resource.pci_vendor_selectors == ("10DE:2236",), "by these the controller compares it"
        assert resource.not_registered_because is not None
        assert resource.not_registered_because.code is ReasonCode.AWAITS_CONTROLLER
        node.agent.take_request(reviewed())
        await node.settle()
        assert not registers(node), "a spec that does not list it has not seen it"
        node.agent.take_request(reviewed(A10))
        await node.settle()
        assert registers(node)
        assert notes(node) == []


async def test_a_resource_that_kubevirt_offers_is_never_registered(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(5)
        assert not registers(node)
        node.agent.take_request(reviewed(A10, withheld=(FOREIGN,)))
        await node.advance(600)
        assert not registers(node)
        assert [one.not_registered_because.code for one in node.view.resources if one.not_registered_because] == [
            ReasonCode.FOREIGN_PROVIDER
        ]
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(600)
        assert not registers(node), "the word on disk counts while nobody answers"
        assert notes(node) == []


async def test_the_wait_is_bounded_and_a_silent_controller_is_told(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(BOUND_S - 2)
        assert not registers(node)
        await node.advance(3)
        assert registers(node)
        (note,) = notes(node)
        assert note.subject == A10
        assert "within 30 s" in note.text
        node.agent.take_request(reviewed(A10, withheld=(FOREIGN,)))
        await node.settle()
        assert not registers(node), "late, and obeyed"
        assert notes(node) == []


async def test_after_a_restart_what_was_offered_is_offered_at_once(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert registers(node), "no controller, no wait"
    async with controlled(simulated("2xA10"), tmp_path) as node:
        assert registers(node), "its VMs run by it"
        await node.advance(BOUND_S + 1)
        assert registers(node)
        assert notes(node) == []


async def test_what_was_only_waited_for_is_new_after_a_restart_too(simulated: Simulated, tmp_path: Path) -> None:
    for _ in range(2):
        async with controlled(simulated("2xA10"), tmp_path) as node:
            node.hold(A10, "0000:65:00.0")
            await node.report_account()
            await node.advance(BOUND_S / 2)
            assert not registers(node) or all(one.withheld for one in node.view.resources)


async def test_a_spec_with_reviews_on_disk_tells_of_a_controller(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path, hears_spec=True) as node:
        node.agent.take_request(reviewed("nvidia.com/other"))
        names = {one.name for one in node.view.resources}
        await node.settle()
    (tmp_path / "ledger.json").unlink()
    async with running_node(simulated("4xT4"), tmp_path, hears_spec=True) as node:
        assert not any(registers(node, name) for name in names)
        node.agent.take_request(reviewed(*names))
        await node.settle()
        assert all(registers(node, name) for name in names if node.offered[name])


async def test_without_the_kind_nobody_waits(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        assert not registers(node)
        node.agent.observe_kind(there=False)
        await node.settle()
        assert registers(node)


NAMES = st.sets(st.sampled_from([ResourceName(f"nvidia.com/{letter}") for letter in "ABCD"]))
SPECS = st.none() | st.builds(
    lambda names, held: NodeSpec(
        "vgpu",
        withheld=tuple(Withheld(one, "ForeignProvider", "") for one in held),
        reviewed=None if names is None else tuple(names),
    ),
    st.none() | NAMES,
    NAMES,
)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(NAMES, NAMES, SPECS, st.floats(0, 20)), max_size=12), st.booleans())
async def test_only_undecided_new_names_wait_and_never_longer_than_the_bound(
    life: list[tuple[set[ResourceName], set[ResourceName], NodeSpec | None, float]], expected: bool
) -> None:
    clock, told = SimClock(), dict[str, Reason | None]()
    review = NameReview(clock, BOUND_S, lambda: None, told.__setitem__, expected=expected)
    since: dict[ResourceName, float] = {}
    for names, before, spec, pause_s in life:
        review.spec = spec
        waiting = review.conclude(names, before).keys()
        decided = {*(spec.reviewed or ()), *(one.resource for one in spec.withheld)} if spec is not None else set()
        controlled = expected or (spec is not None and spec.reviewed is not None)
        assert waiting <= names - decided
        assert controlled or not waiting
        now_s = clock.monotonic_s()
        since = {name: since.get(name, now_s) for name in waiting}
        assert all(now_s - one < BOUND_S for one in since.values())
        overdue = told["controller"]
        assert overdue is None or not waiting & set(overdue.subject.split(", "))
        await clock.advance(pause_s)
