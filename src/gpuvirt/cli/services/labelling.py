"""The agent of `gpuvirt node --labels-only`: it observes the host and labels the node, and can do nothing else.

NVIDIA's device plugin offers the GPUs of such a node, and NVIDIA's driver has them. This agent has no access to the
kubelet, changes no driver and no vGPU, takes no lease and writes no file of the host. It needs neither privileges nor
capabilities: `/sys` and `/proc/driver/nvidia` can be read by every user.
"""

from pathlib import Path

from msgspec.structs import replace

from gpuvirt.cli.parameters import options
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import Settings
from gpuvirt.node.options import NodeOptions
from gpuvirt.paths import HostRoots, KubeletPaths


def labelling_agent(roots: HostRoots, settings: Settings) -> NodeOptions:
    """Return the options of the agent; all GPUs count as GPUs for containers, whatever `settings` say."""
    return NodeOptions(
        kernel=RealKernel(roots),
        kubelet=KubeletPaths(options.KUBELET_DIR),
        ledger=Path(options.LEDGER),  # of the agent's own container
        gates=Path("/run/gpuvirt/gate"),  # of the same container, and never used: the agent allocates nothing
        state_file=None,
        settings=replace(settings, mode=DesiredMode.CONTAINER, modes={}, workload_label=False),
        ids=options.read_pci_ids(None, roots),
        plugin_only=True,
        vgpus_only=True,
        labels_only=True,
    )
