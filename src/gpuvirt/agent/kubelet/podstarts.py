"""Whether a pod of the node has started since an earlier moment, by the folder that the kubelet makes for each pod.

The kubelet makes a pod's folder after the pod's admission, and before it starts a container (pkg/kubelet/kubelet.go:
`SyncPod` calls `makePodDataDirs`). So while the folder of all pods does not change, no admitted pod has started.
"""

from collections.abc import Callable
from pathlib import Path

from gpuvirt.agent.known.kubeletrecord import PodStarts


class PodFolder:
    """The folder with a folder for each pod, which follows from the kubelet's root folder."""

    def __init__(self, folder: Path, is_kubelets: Callable[[], bool]) -> None:
        """`is_kubelets` returns whether it is certain that the running kubelet has this folder."""
        self._folder = folder
        self._is_kubelets = is_kubelets
        self._is_certain = False

    def read(self) -> PodStarts | None:
        """Return a value that changes when a pod starts; None if that is unknown."""
        self._is_certain = self._is_certain or self._is_kubelets()
        if not self._is_certain:
            return None
        try:
            found = self._folder.stat()
        except OSError:
            return None  # unknown: None, no value
        return found.st_ino, found.st_mtime_ns, found.st_nlink
