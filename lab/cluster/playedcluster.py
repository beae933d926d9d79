"""The cluster without a kubelet, for tests of clients: a control plane, and a node that is an object played by kwok."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from lab.cache import cache_root
from lab.cluster import leftovers
from lab.cluster.binaries import binaries
from lab.cluster.controlplane import CONTROL_PLANE, ControlPlane
from lab.cluster.kwok import kwok
from lab.cluster.places import PLAYED
from lab.cluster.settings import NODE

LABELS = {
    "kubernetes.io/arch": "amd64",
    "kubernetes.io/hostname": NODE,
    "kubernetes.io/os": "linux",
}
"""The labels that a kubelet gives its node."""


@dataclass(frozen=True)
class PlayedCluster(ControlPlane):
    """A control plane and the object of a node; no pod runs. It runs beside the cluster with a real node."""

    clients: ClassVar[Sequence[str]] = ("kwok",)
    # kwok watches from version 0. An API server with streaming lists takes that for one, and with Debian's etcd 3.4.23
    # refuses it: kwok then does not see its own renewal of a Lease, and the next ones are conflicts, for a minute.
    # Pods can belong to groups, which the API server has as alpha in 1.36.
    api_server_options: ClassVar[Sequence[str]] = (
        "--feature-gates=WatchList=false,GenericWorkload=true",
        "--runtime-config=api/alpha=true",
    )

    def up(self) -> None:
        """Start everything; raise ClusterError."""
        self.down()
        self.start_control_plane()
        self.start_controllers()
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": LABELS}}
        self.kubectl("apply", "-f", "-", given=json.dumps(node))
        self.start_node()

    @override
    def start_node(self) -> None:
        program, *options = kwok()
        options += ["--kubeconfig=kubeconfig", f"--manage-single-node={NODE}", "--node-lease-duration-seconds=40"]
        self.start("kwok", program, *options)
        self.until(self.node_is_ready, "kwok")

    def down(self) -> None:
        """Stop everything, and remove what it has left."""
        for name in ("kwok", *CONTROL_PLANE):
            self.stop(name)
        leftovers.remove_bridge(self.place)
        shutil.rmtree(self.folder, ignore_errors=True)


def played_cluster() -> PlayedCluster:
    """Return the cluster without a kubelet, running or not; build the commands where they are missing."""
    return PlayedCluster(cache_root() / PLAYED.folder, binaries(), PLAYED)
