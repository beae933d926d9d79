"""The steps of a transition as data. Each can be taken again without harm; each names what it changes in `text`."""

import msgspec

from gpuvirt.facts.ids import NodeName
from gpuvirt.model.workers.hypervisor import Call
from gpuvirt.model.workers.observed import NodePod


class MarkNode(msgspec.Struct, frozen=True):
    """Change what the schedule has set on a node; the node must still have this version."""

    node: NodeName
    version: str
    cordon: bool | None = None
    """True: make it unschedulable, in the schedule's name. False: schedulable. None: leave it."""
    taint: bool | None = None
    """Whether it has the taint of the announcement; None: leave it."""
    labels: tuple[tuple[str, str | None], ...] = ()
    """Labels to set, by key; None removes one. All changes are one write."""

    @property
    def text(self) -> str:
        """The log line: `cordons node worker-1`."""
        verbs = {True: "cordons", False: "uncordons", None: "marks"}
        taint = {True: " and announces it", False: " and takes the announcement away", None: ""}
        labels = ", ".join(f"{key}={value}" if value is not None else f"{key}-" for key, value in self.labels)
        return f"{verbs[self.cordon]} node {self.node}{taint[self.taint]}{f', labels {labels}' if labels else ''}"


class EvictPod(msgspec.Struct, frozen=True):
    """Evict a pod by the API, which asks the budgets; another pod of this name stays."""

    node: NodeName
    pod: NodePod

    @property
    def text(self) -> str:
        """The log line: `evicts pod default/train-0 from node worker-1`."""
        return f"evicts pod {self.pod.where} from node {self.node}"


class DeletePod(msgspec.Struct, frozen=True):
    """Delete a pod, whatever its budgets say: `onTimeout: Force`."""

    node: NodeName
    pod: NodePod

    @property
    def text(self) -> str:
        """The log line: `deletes pod default/train-0 of node worker-1 (onTimeout: Force)`."""
        return f"deletes pod {self.pod.where} of node {self.node} (onTimeout: Force)"


class CallVm(msgspec.Struct, frozen=True):
    """Make a call to the hypervisor for a worker's VM."""

    node: NodeName
    call: Call

    @property
    def text(self) -> str:
        """The log line: `asks the hypervisor to suspend the VM of node worker-1`."""
        return f"asks the hypervisor for {self.call.action} of the VM of node {self.node}"


ScheduleAction = MarkNode | EvictPod | DeletePod | CallVm
