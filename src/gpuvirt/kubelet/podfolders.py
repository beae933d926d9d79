"""Which pods of the checkpoint may not have got their folder yet: that they have none does not tell of their end.

A kubelet records a pod's devices when it admits the pod, and makes the pod's folder a moment later. One that is killed
in between and starts without the API server knows the pod by its checkpoint alone, makes no folder, and admits the pod
again once the API server answers. From then on it writes its checkpoint without pods that have ended.

Source: pkg/kubelet/cm/devicemanager/manager.go of Kubernetes 1.36: UpdateAllocatedDevices removes no pod before all
sources are ready; devicesToAllocate leaves a pod the devices that the checkpoint has.
"""

from collections.abc import Set as AbstractSet

from gpuvirt.facts.ids import PodUid


class PodFolders:
    """The folders of pods, as one agent has seen them."""

    def __init__(self) -> None:
        self._admitted_by: dict[PodUid, str] = {}
        """The kubelet that may have admitted each pod of the checkpoint: the one of the reading before it was found."""
        self.made: frozenset[PodUid] = frozenset()
        """The pods of the last checkpoint whose folder was seen."""
        self._last: str | None = None
        """The kubelet of the last reading, None before the first."""

    def unmade(self, pods: AbstractSet[PodUid], with_folder: AbstractSet[PodUid], kubelet: str) -> frozenset[PodUid]:
        """Return the pods of a checkpoint that another kubelet may have admitted, and whose folder was never seen.

        `with_folder` has those of them that have a folder; it may leave out pods of `made`. `kubelet` distinguishes the
        running kubelet from those before. A pod that the agent finds at its start counts as one of the running kubelet.
        """
        admitting = self._last if self._last is not None else kubelet
        self._admitted_by = {uid: self._admitted_by.get(uid, admitting) for uid in pods}
        self.made = (self.made & pods) | (with_folder & pods)
        self._last = kubelet
        return frozenset(uid for uid, by in self._admitted_by.items() if by != kubelet and uid not in self.made)
