"""A new resource waits for the controller's review of its name; a resource on disk is registered at once."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.facts.ids import ResourceName
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed, Withheld
from gpuvirt.model.offers.namereview import NameReview, ReviewTerms, review_names
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt_sim.kernel import SimKernel
from tests.agent.node.simnode import SimNode, running_node
from tests.sim.simulated import Simulated
from tests.thoroughness import examples

A10 = ResourceName("nvidia.com/GA102GL_A10")
BOUND_S = 30.0


def reviewed(*names: str, withheld: tuple[Withheld, ...] = ()) -> NodeRequest:
    return NodeRequest(spec=Observed(GpuNodeSpec("unmanaged", withheld=withheld, reviewed=names)))


FOREIGN = Withheld(A10, "ForeignProvider", "is offered by KubeVirt itself")


def notes(node: SimNode) -> list[Reason]:
    return [note for note in node.view.problems if note.code is ReasonCode.CONTROLLER_SILENT]


def registers(node: SimNode, name: ResourceName = A10) -> bool:
    """Return whether the plugins would register a resource."""
    return any(resource.name == name and resource.devices and not resource.withheld for resource in node.view.resources)


def controlled(kernel: SimKernel, folder: Path) -> AbstractAsyncContextManager[SimNode]:
    return running_node(kernel, folder, watches_gpu_node=True, awaits_controller=True)


async def test_a_new_resource_waits_for_its_review_and_reports_why(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        node.agent.observations.take_request(NodeRequest(spec=Observed(None)))
        await node.advance(10)
        (resource,) = node.view.resources
        assert (resource.devices, resource.withheld) == ((), True)
        assert resource.pci_vendor_selectors == ("10DE:2236",), "the controller compares the resource by its selectors"
        assert resource.not_registered_because is not None
        assert resource.not_registered_because.code is ReasonCode.AWAITS_CONTROLLER
        node.agent.observations.take_request(reviewed())
        await node.settle()
        assert not registers(node), "the controller has not reviewed a resource that the spec does not list"
        node.agent.observations.take_request(reviewed(A10))
        await node.settle()
        assert registers(node)
        assert notes(node) == []


async def test_a_resource_that_kubevirt_offers_is_never_registered(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(5)
        assert not registers(node)
        node.agent.observations.take_request(reviewed(A10, withheld=(FOREIGN,)))
        await node.advance(600)
        assert not registers(node)
        assert [
            resource.not_registered_because.code for resource in node.view.resources if resource.not_registered_because
        ] == [ReasonCode.FOREIGN_PROVIDER]
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(600)
        assert not registers(node), "the review on disk counts while no controller answers"
        assert notes(node) == []


async def test_the_wait_is_bounded_and_a_silent_controller_is_reported(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        await node.advance(BOUND_S - 2)
        assert not registers(node)
        await node.advance(3)
        assert registers(node)
        (note,) = notes(node)
        assert note.subject == A10
        assert "within 30 s" in note.text
        node.agent.observations.take_request(reviewed(A10, withheld=(FOREIGN,)))
        await node.settle()
        assert not registers(node), "a late review counts, too"
        assert notes(node) == []


async def test_a_registered_resource_is_registered_at_once_after_a_restart(
    simulated: Simulated, tmp_path: Path
) -> None:
    async with running_node(simulated("2xA10"), tmp_path) as node:
        assert registers(node), "no controller, no wait"
    async with controlled(simulated("2xA10"), tmp_path) as node:
        assert registers(node), "running VMs use the resource"
        await node.advance(BOUND_S + 1)
        assert registers(node)
        assert notes(node) == []


async def test_a_resource_without_a_review_waits_again_after_a_restart(simulated: Simulated, tmp_path: Path) -> None:
    for _ in range(2):
        async with controlled(simulated("2xA10"), tmp_path) as node:
            node.hold(A10, "0000:65:00.0")
            await node.report_account()
            await node.advance(BOUND_S / 2)
            assert not registers(node) or all(resource.withheld for resource in node.view.resources)


async def test_a_spec_with_reviews_on_disk_makes_new_resources_wait(simulated: Simulated, tmp_path: Path) -> None:
    async with running_node(simulated("4xT4"), tmp_path, watches_gpu_node=True) as node:
        node.agent.observations.take_request(reviewed("nvidia.com/other"))
        names = {resource.name for resource in node.view.resources}
        await node.settle()
    (tmp_path / "ledger.json").unlink()
    async with running_node(simulated("4xT4"), tmp_path, watches_gpu_node=True) as node:
        assert not any(registers(node, name) for name in names)
        node.agent.observations.take_request(reviewed(*names))
        await node.settle()
        assert all(registers(node, name) for name in names if node.offered[name])


async def test_no_resource_waits_where_the_crd_is_absent(simulated: Simulated, tmp_path: Path) -> None:
    async with controlled(simulated("2xA10"), tmp_path) as node:
        assert not registers(node)
        node.agent.observations.observe_kind(exists=False)
        await node.settle()
        assert registers(node)


NAMES = st.sets(st.sampled_from([ResourceName(f"nvidia.com/{letter}") for letter in "ABCD"]))
SPECS = st.none() | st.builds(
    lambda names, held: GpuNodeSpec(
        "vgpu",
        withheld=tuple(Withheld(name, "ForeignProvider", "") for name in held),
        reviewed=None if names is None else tuple(names),
    ),
    st.none() | NAMES,
    NAMES,
)


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.tuples(NAMES, NAMES, SPECS, st.floats(0, 20)), max_size=12), st.booleans())
def test_only_undecided_new_names_wait_and_never_longer_than_the_bound(
    life: list[tuple[set[ResourceName], set[ResourceName], GpuNodeSpec | None, float]], expected: bool
) -> None:
    now_s, review, terms = 0.0, NameReview(), ReviewTerms(BOUND_S, expected=expected)
    since: dict[ResourceName, float] = {}
    for names, before, spec, pause_s in life:
        review = review_names(review, names, before, spec, terms, now_s)
        waiting = review.waiting.keys()
        assert review_names(review, names, before, spec, terms, now_s) == review, "deciding twice is deciding once"
        decided = (
            {*(spec.reviewed or ()), *(withheld.resource for withheld in spec.withheld)} if spec is not None else set()
        )
        controlled = expected or (spec is not None and spec.reviewed is not None)
        assert waiting <= names - decided
        assert controlled or not waiting
        since = {name: since.get(name, now_s) for name in waiting}
        assert all(now_s - since_s < BOUND_S for since_s in since.values())
        assert review.problem is None or not waiting & set(review.problem.subject.split(", "))
        assert (review.again_at_s is None) is (not waiting)
        now_s += pause_s
