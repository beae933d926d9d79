"""The intervals of the extender's work, and the limits of its waits. kube-scheduler waits for 5 s in all."""

import msgspec


class ExtenderIntervals(msgspec.Struct, frozen=True):
    """All intervals, in seconds."""

    look_s: float = 0.02
    """Between checks of a state that this process is about to observe."""
    observe_s: float = 1.0
    """How long a pod that kube-scheduler has observed may be unknown here; both watch the same API server."""
    turn_s: float = 0.05
    """The longest wait for a binding after the last answer about its pod; it usually follows after 2 to 10 ms. A filter
    that does not know it may choose the same units for the next pod."""
    place_s: float = 660.0
    """How long units are kept for a pod that kube-scheduler has placed and that waits to be bound. It waits 600 s for
    volumes and claims."""
    retried_s: float = 60.0
    """The same for a pod that has failed before, while kube-scheduler has not reported its node: it does not report
    another failure with the same text. A gang waits for 60 s by the defaults of the coscheduling plugin."""
    unreported_s: float = 3.0
    """The same where such failures are known, and for a pod of a PodGroup: kube-scheduler places the group in one go,
    and then binds its pods, or reports their nodes."""
    failing_group_s: float = 0.05
    """The same for a PodGroup of which another pod was refused, or that has failed before. kube-scheduler 1.36 tries
    it again every 2 ms, so that filter for other pods waits for this time."""
    place_check_s: float = 0.25
    """Between checks for places whose time is over."""
    late_s: float = 10.0
    """How much later than kube-scheduler this process may observe an event, at most: then a pod that was refused before
    it waits for its next event."""
    write_s: float = 2.5
    """The longest wait for a binding that was sent, also by the API server (`?timeout=`), which gives it up before
    another replica may lead."""
    read_s: float = 1.5
    """The longest wait for the pod after a binding that was not answered."""
    change_s: float = 1.5
    """The longest wait for the change of one pod."""
    again_s: float = 0.25
    """Between tries to change a pod, or to find out whether a binding was made, while a term begins."""
    unknown_s: float = 1.0
    """How often the outcomes of bindings are asked for that could not be found out."""
    fenced_s: float = 2.0
    """How long a request waits while pods are fenced, whose changes have kube-scheduler place them again."""
    preempt_s: float = 2.0
    """How long victims are searched once a node has some."""
    route_check_s: float = 2.0
    """How long a change of the EndpointSlice by others lasts, about."""
    route_again_s: float = 0.5
    """Between tries to write the slice."""
    route_try_s: float = 4.0
    """The longest time of one try."""
    route_withdraw_s: float = 1.0
    """The longest time of the last write of a process that ends."""

    @property
    def binding_s(self) -> float:
        """The longest time of a binding: the write, and reading the pod after one that was not answered."""
        return self.write_s + self.read_s


INTERVALS = ExtenderIntervals()
"""The intervals of a real extender; tests have others."""
