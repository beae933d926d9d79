"""Shares the controller's observations with other tasks, so that no object is watched twice."""

from typing import Protocol

from gpuvirt.controller.nodes.resolve import OwnedGpuNode
from gpuvirt.controller.picture import Picture
from gpuvirt.kube.cache import Delta
from gpuvirt.kube.kinds.core import ReadNode


class Follower(Protocol):
    """Receives the controller's observations; each method returns at once."""

    def observe_nodes(self, delta: Delta[ReadNode]) -> None:
        """Record changes of nodes."""
        ...

    def observe_gpu_nodes(self, delta: Delta[OwnedGpuNode]) -> None:
        """Record changes of GpuNodes."""
        ...

    def observe_picture(self, picture: Picture) -> None:
        """Record the observed state that decisions follow from."""
        ...
