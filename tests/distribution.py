"""How a run's tests are distributed over workers, and whose turn it is on the CPUs."""

import os
import shlex
import sys
from collections.abc import Sequence
from functools import cache

import pytest
from execnet import XSpec
from lab.cluster import secondcomputer
from typing_extensions import override
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from tests.rings import RINGS

ONE_WORKER = {
    "guest": ("[guest", "/test_guest.py"),
    "controlplane": ("tests/controlplane/",),
    "cluster": ("tests/cluster/", "/test_image.py", "/test_second_computer.py"),
    "helm": ("/test_templates.py", "/test_sharing.py"),
}
"""The resources that exist once on a computer, with parts of the ids of the tests that use them."""

SECOND = "second"
"""The group of the tests of the second node."""
SECOND_FROM = "tests/cluster/test_o"
"""They begin here: half of the seconds of all tests of real nodes, so that both nodes end at the same time."""

LONGEST = ("cluster", SECOND, "controlplane")
"""The groups that take the longest; a run ends as early as they do."""
NICENESS = 5
"""Of all other tests while these groups can run here."""


class Groups(LoadGroupScheduling):
    """Gives all tests that share something to one worker.

    Their mark xdist_group requests the same, but xdist 3.8 writes it where pytest 9.2 does not read it.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid) or super()._split_scope(nodeid)
        return "cluster" if group == SECOND and not _second_runs(self.numnodes) else group

    @override
    def add_node(self, node: WorkerController) -> None:
        super().add_node(node)
        # Of more workers than groups, xdist ends the last ones.
        self.assigned_work = dict(sorted(self.assigned_work.items(), key=lambda item: _is_apart(item[0])))

    @override
    def _assign_work_unit(self, node: WorkerController) -> None:
        for group in reversed(LONGEST):  # xdist begins with the groups of most tests
            if group in self.workqueue:
                self.workqueue.move_to_end(group, last=group == SECOND)
        if not _is_apart(node):
            super()._assign_work_unit(node)
        elif SECOND in self.workqueue:
            self.workqueue.move_to_end(SECOND, last=False)
            super()._assign_work_unit(node)
        else:
            node.shutdown()  # on the second computer, other tests lack the network


def group_of(nodeid: str) -> str | None:
    """Return the group of a test; None if any worker may run it."""
    group = next((group for group, parts in ONE_WORKER.items() if any(part in nodeid for part in parts)), None)
    return SECOND if nodeid.startswith("tests/cluster/") and nodeid >= SECOND_FROM else group


def set_apart(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Have the last worker run on the second computer.

    It runs there from its start: a process that enters later has threads, such as gRPC's, that are still outside.
    """
    if config.getoption("dist") == "loadgroup" and _second_runs(len(specs)):
        specs[-1].python = shlex.join((str(secondcomputer.COMMAND), sys.executable))


def _is_apart(node: WorkerController) -> bool:
    return node.gateway.spec.python is not None


def _second_runs(number: int) -> bool:
    """Return whether a second node is worth a worker of so many."""
    return _longest_run() and number >= len(LONGEST)


def workers(cpus: int) -> int:
    """Return how many workers keep the CPUs busy: the tests of the longest groups mostly wait for other programs."""
    return cpus + len(LONGEST) if _longest_run() else cpus


def give_way(nodeid: str) -> None:
    """Let the longest groups have the CPUs first, here and in the programs that a test starts.

    Only root can take back what it has given, and these groups run as root alone.
    """
    if _longest_run():
        os.setpriority(os.PRIO_PROCESS, 0, 0 if group_of(nodeid) in LONGEST else NICENESS)


@cache
def _longest_run() -> bool:
    return RINGS["cluster"].missing() is None
