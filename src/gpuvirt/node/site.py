"""The site of an agent: the host, the serial workers, the agent's own files, and its permissions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.model.allocation.allocations import Consumers, ReadRecorded
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.node.change import site as change
from gpuvirt.node.known.podinquiry import PodInquiry
from gpuvirt.node.loops.serialworker import SerialWorker
from gpuvirt.node.published.markers import Markers

PodStarts = tuple[int, int, int]
"""What the folder of the node's pods shows: another value after a pod has started."""


def _no_pod_starts() -> PodStarts | None:
    return None


@dataclass(frozen=True, slots=True)
class Moving:
    """What an agent needs to change GPUs."""

    site: change.Site
    workers: Callable[[str], SerialWorker]
    """Returns the serial worker of an isolation unit."""


@dataclass(frozen=True, slots=True)
class Site:
    """The site of one agent: a host, real or simulated, and the paths of the agent's own files."""

    kernel: Kernel
    clock: Clock
    watching: SerialWorker
    """The worker that observes the host."""
    writing: SerialWorker
    """The worker that writes the agent's own files."""
    allocating: SerialWorker
    """The worker that reads devices for Allocate."""
    recorded: ReadRecorded
    """Reads the kubelet's record of its allocations."""
    ledger: Path
    """The ledger; the file with the tenants of GPUs is beside it."""
    gates: Path
    """The folder of the gates that the agent's allocations pass."""
    state_file: Path | None
    """None if the agent can't write to the host's `/run`."""
    cdi_folder: Path | None = None
    """The folder of CDI specs; None: no CDI specs."""
    markers: Markers | None = None
    """The files for which NVIDIA's operands wait; None: no such files."""
    moving: Moving | None = None
    """What the agent needs to change GPUs; None for an agent that changes no GPUs."""
    vgpu_configs: ConfigText | None = None
    """The vGPU configs of the settings."""
    desired_by_gpu: Path | None = None
    """The file with the desired state from the cluster; None: it is not kept on disk."""
    node_name: NodeName | None = None
    """The name of the Kubernetes node."""
    vgpus_only: bool = False
    """Whether another device plugin offers the vGPUs of this node, so that gpuvirt does not change drivers."""
    watches_gpu_node: bool = False
    """Whether the agent watches the node's GpuNode, which takes precedence over labels and settings."""
    awaits_controller: bool = False
    """Whether a controller lists in that GpuNode the resources that KubeVirt offers itself."""
    writes_node_counts: bool = False
    """Whether the agent writes the counts of `Notice` into the node's status."""
    may_lack_gates: bool = False
    """Whether the agent offers devices even where it can't write its gates."""
    pod_starts: Callable[[], PodStarts | None] = _no_pod_starts
    """Reads whether a pod of the node has started since an earlier reading; None if that is unknown."""
    pod_inquiry: PodInquiry = field(default_factory=PodInquiry)
    """The question for the pods of the node, asked while the kubelet's record may be incomplete."""
    lost: Callable[[], Consumers] = dict
    """Returns the devices of running pods that the kubelet has forgotten, and may request for other pods."""
    sees_processes: bool = True
    """Whether `/proc` shows the processes of the host, not only those of the agent's pod."""
