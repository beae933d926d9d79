"""The options of an agent's process: the host, the agent's own files, its permissions, and its tasks."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gpuvirt.agent.change import changehost as change
from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.agent.published import Markers
from gpuvirt.clock import Clock, RealClock
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.access.kernel import Kernel
from gpuvirt.hardware.access.tools import Tools
from gpuvirt.loops.serialworker import SerialWorker, ThreadWorker
from gpuvirt.model.desired.settings import CdiUse
from gpuvirt.model.node.picture import NodeTerms
from gpuvirt.paths import KubeletPaths


class NodeOptions(msgspec.Struct, frozen=True):
    """The options of the process; the agent and its parts read them here, too."""

    kernel: Kernel
    kubelet: KubeletPaths
    ledger: Path
    """The ledger; the file with the tenants of GPUs is beside it."""
    gates: Path
    """The folder of the gates, by which changes by commands and allocations by this agent exclude each other."""
    state_file: Path | None
    """None if the agent can't write to the host's `/run`."""
    terms: NodeTerms
    """The inputs of the decisions; the agent adds its own view and its random number."""
    cdi_folder: Path | None = None
    """The folder of the agent's CDI specs; None: no CDI specs."""
    cdi_folders: Sequence[Path] = ()
    """The folders besides `cdi_folder` that may have CDI specs of NVIDIA (`/etc/cdi`)."""
    cdi_enabled: Callable[[], bool | None] = lambda: None
    """Reads whether the container runtime's configuration has CDI on; None where it says nothing."""
    system_root: Path = Path("/")
    """The root folder of the host, with the library that limits shares."""
    driver_root: Path = Path("/run/nvidia/driver")
    """The root folder of the driver's container, whose programs take precedence over the host's."""
    proc: Path | None = None
    """The host's `/proc`, by which files of containers can be read; None: they are not read."""
    plugin_only: bool = False
    """Whether the agent is unprivileged: it sees no processes of the host, and offers devices without gates, too."""
    labels_only: bool = False
    """Whether the agent observes the host for the node's labels alone: it offers nothing, and knows no kubelet."""
    config_file: Path | None = None
    """A file of vGPU configs, which the agent follows instead of the cluster's ConfigMap."""
    listen: tuple[str, int] | None = None
    """The address and port of probes and metrics."""
    service_manager: str | None = None
    """The socket of systemd, which waits until the agent is ready; None where no service manager waits."""
    clock: Clock = msgspec.field(default_factory=RealClock)
    intervals: Intervals = msgspec.field(default_factory=Intervals)
    workers: Callable[[str], SerialWorker] = ThreadWorker
    """Returns a serial worker: of an isolation unit, or of a part of the agent."""
    markers: Markers | None = None
    """The files for which NVIDIA's operands wait; None: no such files."""
    node_name: NodeName | None = None
    """The name of the Kubernetes node."""
    desired_state: Path | None = None
    """The file with the desired state from the cluster; None: it is not kept on disk."""
    change_host: change.ChangeHost | None = None
    """The host on which the agent changes GPUs; None for an agent that changes none."""
    tools: Tools | None = None
    """The host's programs, which the agent asks for names of vGPU types; None for an agent that can run none."""
    pods: Path | None = None
    """The folder in which the kubelet makes a folder for each pod; None if the agent can't see it."""

    @property
    def device_specs(self) -> Path | None:
        """The folder of the CDI specs of devices; None: there are none."""
        return None if self.terms.settings.cdi is CdiUse.NONE else self.cdi_folder
