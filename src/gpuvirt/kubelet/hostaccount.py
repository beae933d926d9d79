"""Reads once, for a command, the devices of pods from the kubelet's checkpoint and its pod-resources API.

A host without the kubelet's folder and without a kubelet process has no kubelet. Of a kubelet that does not run, the
checkpoint is read. Of a kubelet that runs, the checkpoint and the API must be read. A missing checkpoint means that no
device plugin has ever registered, provided that the API lists no device of a plugin. In all other cases the allocations
are unknown.
"""

from pathlib import Path

from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.nodes import ReadNode, unread_node
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.checkpoint import with_answers, without_gone
from gpuvirt.kubelet.podresources import PodResourcesUnknownError, ask_consumers
from gpuvirt.model.allocation.allocations import Consumers
from gpuvirt.paths import KubeletPaths


class AccountUnknownError(GpuvirtError):
    """The allocations of pods are not completely known; `known` are the allocations that are."""

    def __init__(self, seen: str, known: Consumers) -> None:
        super().__init__(seen)
        self.known = known


def read_account(
    paths: KubeletPaths, kubelets: tuple[int, ...] | Unread, read_node: ReadNode = unread_node
) -> Consumers | None:
    """Return the devices of pods, None on a host without a kubelet; raise AccountUnknownError.

    `kubelets` are the pids of the running kubelets; `read_node` reads the nodes in the answers of plugins.
    """
    in_checkpoint, problem = _read_checkpoint(paths.checkpoint, read_node)
    if problem is None and in_checkpoint is None and has_no_kubelet(paths, kubelets):
        return None
    in_api, unknown = _ask_api(paths.pod_resources_socket)
    in_file = in_checkpoint or {}
    known = {**without_gone(paths, in_file, in_api or {}), **with_answers(in_api or {}, in_file)}
    if problem is not None:
        raise AccountUnknownError(problem, known)
    if unknown is not None and kubelets != ():  # unknown: a kubelet may run
        raise AccountUnknownError(f"{running_text(kubelets)}; {unknown}", known)
    if in_checkpoint is None and (in_api is None or any("/" in resource for resource, _ in in_api)):
        raise AccountUnknownError(f"no {paths.checkpoint}, although {paths.root} exists or a kubelet runs", known)
    return known


def has_no_kubelet(paths: KubeletPaths, kubelets: tuple[int, ...] | Unread) -> bool:
    """Return whether a host has no kubelet: neither the kubelet's folder nor a kubelet process."""
    return kubelets == () and _is_absent(paths.root)  # unknown: the host may have a kubelet


def _read_checkpoint(path: Path, read_node: ReadNode) -> tuple[Consumers | None, str | None]:
    """Return the allocations in the checkpoint, None without one, and the reason why it could not be read."""
    try:
        return checkpoint.consumers(checkpoint.parse(path.read_bytes()), read_node), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path}: {error.strerror}"
    except DamagedError as error:
        return None, f"{path}: {error}"


def _ask_api(socket: Path) -> tuple[Consumers | None, str | None]:
    """Return the allocations that the API lists, and the reason why it did not answer."""
    try:
        if _is_absent(socket):
            return None, f"no {socket}"
        return ask_consumers(socket), None
    except PodResourcesUnknownError as error:
        return None, str(error)


def _is_absent(path: Path) -> bool:
    """Return whether a path does not exist; False where that is unknown."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def running_text(kubelets: tuple[int, ...] | Unread) -> str:
    """Return a text that lists the running kubelets."""
    if isinstance(kubelets, Unread):
        return f"it is unknown whether a kubelet runs ({kubelets.path}: {kubelets.detail})"
    return f"a kubelet runs (pid {', '.join(map(str, kubelets))})"
