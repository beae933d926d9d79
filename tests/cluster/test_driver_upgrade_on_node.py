"""NVIDIA's operator replaces the driver of a node whose GPUs pods share: on a real kubelet and containerd.

The labels are those that the operator sets, in its order. The driver is unloaded only where no process has a GPU open.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from lab.cluster.settings import NODE

from gpuvirt.kube.labels import CLIENT, PAUSED_FOR_DRIVER, deploy_label
from tests.cluster.clusterlab import LabNode
from tests.cluster.sharednode import SHOW, VGPU, A, Shared, main, shared_node

pytestmark = [pytest.mark.ring("cluster"), pytest.mark.xdist_group("cluster")]

UPGRADE = "nvidia.com/gpu-driver-upgrade-state"
BEFORE_THE_UNLOAD = (
    "upgrade-required",
    "cordon-required",
    "wait-for-jobs-required",
    "pod-deletion-required",
    "pod-restart-required",
)
"""The operator's states up to the restart of its driver's pod, which unloads the old driver first."""
OPENS = f"exec 3< /dev/nvidia0; {SHOW}; sleep 1000"


class Driver:
    """NVIDIA's driver, as the kernel counts who has it open."""

    def __init__(self) -> None:
        self.is_loaded = True

    @property
    def users(self) -> list[int]:
        """The processes of the node that have a GPU open."""
        found: set[int] = set()
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # it was closed meanwhile
                if str(link.readlink()).startswith("/dev/nvidia"):
                    found.add(int(link.parts[2]))
        return sorted(found)

    def unload(self) -> bool:
        """Unload it as `rmmod` does, which fails while it is open."""
        self.is_loaded = self.is_loaded and bool(self.users)
        return not self.is_loaded


@pytest.fixture
def shared(node: LabNode, tmp_path: Path) -> Iterator[Shared]:
    """The node with two GPUs; its labels go with the test."""
    with shared_node(node, tmp_path) as shared:
        yield shared
        node.kubectl("label", "node", NODE, f"{UPGRADE}-", f"{deploy_label(CLIENT)}-")


def test_the_driver_is_unloaded_when_the_last_pod_with_a_share_has_ended(shared: Shared) -> None:
    node, driver = shared.node, Driver()

    def label(**labels: str) -> None:
        names = {"state": UPGRADE, "client": deploy_label(CLIENT)}
        node.kubectl("label", "node", NODE, "--overwrite", *(f"{names[key]}={text}" for key, text in labels.items()))

    def described() -> str:
        return node.kubectl("describe", "pod", "late")

    with shared.agent():
        shared.start("has", main(300, OPENS), gpu=A)
        assert shared.seen("has") == A
        for state in BEFORE_THE_UNLOAD:
            label(state=state)
            node.until_allocatable(VGPU, 300)
            assert not driver.unload(), f"{state}: the pod still has it"
        label(client=PAUSED_FOR_DRIVER)
        shared.start("late", main(200, OPENS), gpu=A)
        node.until(lambda: "Insufficient nvidia.com/vgpu" in described(), described)
        assert node.status("has").containerStatuses[0].restartCount == 0
        assert not driver.unload()
        node.delete("late")  # without the extender it would be bound once the units of the other pod are free
        node.delete("has")
        node.until(driver.unload, lambda: str(driver.users))
        node.until(lambda: not shared.records.pods, lambda: str(shared.records))
        label(client="true", state="validation-required")
        node.until_allocatable(VGPU, 0)
        label(state="upgrade-done")
        node.until_allocatable(VGPU, 2000)
        shared.start("next", main(200, OPENS), gpu=A)
        assert shared.seen("next") == A
