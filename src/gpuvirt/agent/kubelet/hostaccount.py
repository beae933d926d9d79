"""Reads once, for a command, the devices of pods from the kubelet's checkpoint and its pod-resources API.

A host has no kubelet where that is proved (`nokubelet`). Of a kubelet that does not run, its record is read. Of a
kubelet that runs, the record and the API must be read. A missing checkpoint is unknown, unless an agent has found in
this boot that no pod had a device before the kubelet writes it (`recordhistory`). In all other cases the allocations
are unknown.
"""

from pathlib import Path

from gpuvirt.agent.known.nokubelet import Kubelets, running_text
from gpuvirt.agent.kubelet.checkpoint import exists, with_answers, without_gone
from gpuvirt.agent.kubelet.podresources import PodResourcesUnknownError, ask_consumers
from gpuvirt.agent.kubelet.recordedallocations import CheckpointContent, RecordedAllocations
from gpuvirt.errors import GpuvirtError
from gpuvirt.model.allocation.allocations import Consumers


class AccountUnknownError(GpuvirtError):
    """The allocations of pods are not completely known; `known` are the allocations that are."""

    def __init__(self, seen: str, known: Consumers) -> None:
        super().__init__(seen)
        self.known = known


def read_account(recorded: RecordedAllocations, kubelets: Kubelets) -> Consumers | None:
    """Return the devices of pods, None on a host without a kubelet; raise AccountUnknownError.

    `kubelets` are the pids of the running kubelets.
    """
    paths = recorded.paths
    recorded.observe_kubelet(lambda: kubelets)
    look = recorded.look()
    if look.is_missing and not recorded.has_kubelet:
        return None
    in_api, unknown = _ask_api(paths.pod_resources_socket)
    recorded.observe_api(answered=in_api is not None)
    recorded.judge(look)
    listed = look.checkpoint.consumers if isinstance(look.checkpoint, CheckpointContent) else {}
    claims = dict(look.claims) if isinstance(look.claims, tuple) else {}
    in_file = {**recorded.lost(), **claims, **listed}
    known = {**without_gone(paths, in_file, in_api or {}), **with_answers(in_api or {}, in_file)}
    problems: list[str] = []
    if unknown is not None and kubelets != ():  # unknown: a kubelet may run
        problems.append(f"{running_text(kubelets)}; {unknown}")
    if (reason := recorded.why_unknown(look)) is not None:
        problems.append(reason.seen or reason.message)
    if problems:
        raise AccountUnknownError("; ".join(problems), known)
    return known


def _ask_api(socket: Path) -> tuple[Consumers | None, str | None]:
    """Return the allocations that the API lists, and the reason why it did not answer."""
    try:
        if exists(socket) is False:
            return None, f"no {socket}"
        return ask_consumers(socket), None
    except PodResourcesUnknownError as error:
        return None, str(error)


def answers(socket: Path) -> bool:
    """Return whether a kubelet answers at its socket, whatever the names of the processes say."""
    return _ask_api(socket)[0] is not None
