"""How a run's tests are distributed over workers, and whose turn it is on the CPUs."""

import os
from functools import cache

from typing_extensions import override
from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController

from tests.rings import RINGS

ONE_WORKER = {
    "guest": ("[guest", "/test_guest.py"),
    "controlplane": ("tests/controlplane/",),
    "cluster": ("tests/cluster/", "/test_image.py"),
    "helm": ("/test_templates.py", "/test_sharing.py"),
}
"""The resources that exist once on a computer, with parts of the ids of the tests that use them."""

LONGEST = ("cluster", "controlplane")
"""The groups that take the longest; a run ends as early as they do."""
NICENESS = 5
"""Of all other tests while these groups can run here."""


class Groups(LoadGroupScheduling):
    """Gives all tests that share something to one worker.

    Their mark xdist_group requests the same, but xdist 3.8 writes it where pytest 9.2 does not read it.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid) or super()._split_scope(nodeid)

    @override
    def _assign_work_unit(self, node: WorkerController) -> None:
        for group in reversed(LONGEST):  # xdist begins with the groups of most tests
            if group in self.workqueue:
                self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)


def group_of(nodeid: str) -> str | None:
    """Return the group of a test; None if any worker may run it."""
    return next((group for group, parts in ONE_WORKER.items() if any(part in nodeid for part in parts)), None)


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
