"""A write's response and watch events: the newer version counts, in any order of arrival."""

from gpuvirt.clock import Signal
from gpuvirt.controller.controller import KubeVirtStores
from gpuvirt.controller.store import Store
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.failures import ForbiddenError, NotFoundError, UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.kinds.gpunode import GPU_NODES
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import NODES, Collection, Metadata
from gpuvirt.model.desired.observed import Observed

KEY = ObjectKey("", "node01")


def node(version: int) -> Node:
    return Node(Metadata(name="node01", resource_version=str(version)))


def store() -> Store[Node]:
    return Store(Collection(NODES, Node), Signal())


def version_in(found: Store[Node]) -> str:
    one = found.get("node01")
    assert one is not None
    return one.metadata.resource_version


def test_a_write_response_updates_the_store_before_the_watch() -> None:
    found = store()
    found.observe(Delta({KEY: node(9)}))
    found.take(node(10))
    assert version_in(found) == "10"


def test_a_late_write_response_does_not_revert_a_newer_object() -> None:
    found = store()
    found.observe(Delta({KEY: node(11)}))
    found.take(node(10))
    assert version_in(found) == "11"


def test_the_store_is_unknown_before_the_first_list() -> None:
    found = store()
    found.take(node(10))
    assert found.objects is None


def test_a_core_kind_is_never_missing() -> None:
    """Without any nodes, GpuNodes would be deleted; a 404 for the nodes comes from a proxy."""
    found = store()
    found.observe(Delta({KEY: node(9)}))
    found.observe_error(NotFoundError("no such page"))
    assert version_in(found) == "9"
    assert found.installed
    assert isinstance(found.problem, NotFoundError)
    new = store()
    new.observe_error(NotFoundError("no such page"))
    assert not new.is_observed


def test_a_missing_kind_has_no_objects_and_an_unreachable_server_leaves_it_unknown() -> None:
    found = Store(Collection(GPU_NODES, Node), Signal())
    found.observe_error(UnreachableError("away"))
    assert found.objects is None
    found.observe(Delta({KEY: node(9)}))
    found.observe_error(UnreachableError("away"))
    assert version_in(found) == "9"
    found.observe_error(NotFoundError("no such kind"))
    assert found.get("node01") is None
    assert not found.installed


def test_kubevirt_kinds_that_cannot_be_read_are_reported_with_the_error() -> None:
    stores = KubeVirtStores(Signal())
    for number, store in enumerate(stores.all):
        store.observe_error(NotFoundError("none") if number % 2 else ForbiddenError("no"))
    observed = stores.observed({}, None)
    assert len(observed.problems) == (len(stores.all) + 1) // 2
    assert set(observed.problems) == {"no"}
    assert observed.kubevirts is None
    assert observed.hyper_convergeds == Observed(None)
