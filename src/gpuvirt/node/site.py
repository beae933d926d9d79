"""Where an agent works: the host, its lanes, its own files, and what it may do there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.kernel import Kernel
from gpuvirt.model.allocation.recorded import ReadRecorded
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.node.change import site as change
from gpuvirt.node.loops.serialworker import SerialWorker
from gpuvirt.node.published.markers import Markers


@dataclass(frozen=True, slots=True)
class Moving:
    """What an agent needs that moves GPUs."""

    site: change.Site
    workers: Callable[[str], SerialWorker]
    """A lane for each unit."""


@dataclass(frozen=True, slots=True)
class Site:
    """One agent's: the host, real or simulated, and where its own files lie."""

    kernel: Kernel
    clock: Clock
    watching: SerialWorker
    """The lane of looks at the host."""
    writing: SerialWorker
    """The lane of our own files."""
    giving: SerialWorker
    """The lane of looks at what is about to be given away."""
    recorded: ReadRecorded
    """Reads what the kubelet has recorded of its allocations."""
    ledger: Path
    state_file: Path | None
    """None where the host's `/run` is not ours to write."""
    cdi_folder: Path | None = None
    """Where CDI specs are kept, None for nowhere."""
    markers: Markers | None = None
    """The files by which NVIDIA's operands wait; None where nobody asked for them."""
    moving: Moving | None = None
    """Where GPUs are moved between drivers; None where they are left alone."""
    gates: Path | None = None
    """The folder of the gates, where the agent does not change GPUs; None: no process changes what it offers."""
    vgpu_configs: ConfigText | None = None
    """The vGPU configs of the settings."""
    desired_by_gpu: Path | None = None
    """Where it is kept what the cluster wants of this node; None for nowhere."""
    node_name: NodeName | None = None
    """What the cluster calls this node."""
    vgpus_only: bool = False
    """Whether another's device plugin offers the vGPUs of this node, and GPUs stay with the drivers that they have."""
    hears_spec: bool = False
    """Whether somebody follows the node's GpuNode, which goes before labels and settings."""
    awaits_controller: bool = False
    """Whether a controller says in that GpuNode which resources KubeVirt offers itself."""
    tells_scheduler: bool = False
    """Whether somebody has the node's status follow `Agent.counts`."""
    sees_processes: bool = True
    """Whether `/proc` shows the host's processes, and not just our own pod's."""
