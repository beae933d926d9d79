"""The cluster of these tests: a control plane whose node is an object alone, beside the one with a real node."""

from collections.abc import Iterator

import pytest
from lab.cluster.playedcluster import PlayedCluster, played_cluster

from tests.cluster.labnamespace import LabNamespace, namespace_of
from tests.pristine import clear


@pytest.fixture(scope="session")
def running_lab() -> Iterator[PlayedCluster]:
    """The cluster for all tests of a run; a computer has one, so other runs wait for it."""
    lab = played_cluster()
    with lab.reserved():
        lab.up()
        try:
            yield lab
        finally:
            lab.down()


@pytest.fixture
def lab(running_lab: PlayedCluster) -> PlayedCluster:
    """The same cluster, without anything that an earlier test has left in it."""
    clear(running_lab)
    return running_lab


@pytest.fixture
def node(lab: PlayedCluster, request: pytest.FixtureRequest) -> Iterator[LabNamespace]:
    """A namespace for this test, in a cluster with a node on which no pod runs."""
    found = LabNamespace(lab, namespace_of(request.node.name))
    with found.existing():
        yield found
