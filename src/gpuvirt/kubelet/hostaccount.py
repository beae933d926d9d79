"""Reads once, for a command, which devices pods have by the kubelet's checkpoint and its pod-resources API.

A host without the kubelet's folder and without a kubelet's process has no kubelet. A kubelet that does not run left its
checkpoint. Of one that runs, both must be read. A missing checkpoint means that no device plugin has ever registered,
where the kubelet itself answers that no pod has a device of one. Anything else is unknown.
"""

from pathlib import Path

from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.pci import Unread
from gpuvirt.kubelet import checkpoint
from gpuvirt.kubelet.checkpoint import without_gone
from gpuvirt.kubelet.podresources import Consumers, PodResourcesUnknownError, ask_consumers
from gpuvirt.paths import KubeletPaths


class AccountUnknownError(GpuvirtError):
    """It is not known what pods have; `known` is the part that is."""

    def __init__(self, seen: str, known: Consumers) -> None:
        super().__init__(seen)
        self.known = known


def read_account(paths: KubeletPaths, kubelets: tuple[int, ...] | Unread) -> Consumers | None:
    """Return what pods have, None on a host that has no kubelet; raise AccountUnknownError.

    `kubelets` are the pids of the kubelets that run.
    """
    written, problem = _written(paths.checkpoint)
    if problem is None and written is None and has_no_kubelet(paths, kubelets):
        return None
    told, unknown = _told(paths.pod_resources_socket)
    known = {**without_gone(paths, written or {}, told or {}), **(told or {})}
    if problem is not None:
        raise AccountUnknownError(problem, known)
    if unknown is not None and kubelets != ():
        raise AccountUnknownError(f"{running_text(kubelets)}; {unknown}", known)
    if written is None and (told is None or any("/" in resource for resource, _ in told)):
        raise AccountUnknownError(f"no {paths.checkpoint}, though {paths.root} is there or a kubelet runs", known)
    return known


def has_no_kubelet(paths: KubeletPaths, kubelets: tuple[int, ...] | Unread) -> bool:
    """Return whether a host is known to have no kubelet: neither its folder nor a process of one."""
    return kubelets == () and _is_absent(paths.root)


def _written(path: Path) -> tuple[Consumers | None, str | None]:
    """Return what the checkpoint says, None without one, and why it could not be read."""
    try:
        return checkpoint.consumers(checkpoint.parse(path.read_bytes())), None
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path}: {error.strerror}"
    except DamagedError as error:
        return None, f"{path}: {error}"


def _told(socket: Path) -> tuple[Consumers | None, str | None]:
    """Return what the API says, and why it could not be heard."""
    try:
        if _is_absent(socket):
            return None, f"no {socket}"
        return ask_consumers(socket), None
    except PodResourcesUnknownError as error:
        return None, str(error)


def _is_absent(path: Path) -> bool:
    """Return whether a path is known not to be there."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def running_text(kubelets: tuple[int, ...] | Unread) -> str:
    """Return in words which kubelets run."""
    if isinstance(kubelets, Unread):
        return f"whether a kubelet runs can't be seen ({kubelets.path}: {kubelets.said})"
    return f"a kubelet runs (pid {', '.join(map(str, kubelets))})"
