"""The rights of each kind of agent on its host: the whole one, the unprivileged one, and the one that only labels.

The agent of `gpuvirt node --labels-only` observes the host and labels the node, and can do nothing else. NVIDIA's
device plugin offers the GPUs of such a node, and NVIDIA's driver has them. This agent has no access to the kubelet,
changes no driver and no vGPU, takes no lease and writes no file of the host. It needs neither privileges nor
capabilities: `/sys` and `/proc/driver/nvidia` can be read by every user.
"""

from pathlib import Path

from msgspec.structs import replace

from gpuvirt.cli.parameters import options
from gpuvirt.errors import ConfigError
from gpuvirt.facts.runtimes import enables_cdi
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.hardware.host.runtimes import read_runtimes
from gpuvirt.model.desired.gpumodes import DesiredMode
from gpuvirt.model.desired.settings import CdiUse, Settings
from gpuvirt.model.inventory.pciids import PciIds
from gpuvirt.node.change.changehost import change_host_of
from gpuvirt.node.change.gate.gates import plugin_gates
from gpuvirt.node.options import NodeOptions
from gpuvirt.node.published import cdifiles, statefile
from gpuvirt.paths import HostRoots, KubeletPaths


def whole_agent(roots: HostRoots, kubelet: KubeletPaths, settings: Settings, ids: PciIds) -> NodeOptions:
    """Return the options of an agent that offers GPUs and changes them."""
    kernel = RealKernel(roots)
    change_host = change_host_of(kernel, roots, kubelet)
    return _offering(
        NodeOptions(
            kernel=kernel,
            kubelet=kubelet,
            ledger=roots.local(options.LEDGER),
            gates=change_host.locks,
            state_file=roots.run / statefile.FILE,
            settings=settings,
            ids=ids,
            change_host=change_host,
            cdi_folder=roots.run / cdifiles.FOLDER,
            proc=roots.proc,
            pods=_pods(roots, kubelet),
        ),
        roots,
    )


def plugin_only_agent(roots: HostRoots, kubelet: KubeletPaths, settings: Settings, ids: PciIds) -> NodeOptions:
    """Return the options of an unprivileged agent: its files are beside the kubelet's sockets, it changes nothing."""
    return _offering(
        NodeOptions(
            kernel=RealKernel(roots),
            kubelet=kubelet,
            ledger=options.plugin_only_ledger(kubelet),
            gates=plugin_gates(kubelet.device_plugins),
            state_file=None,
            settings=settings,
            ids=ids,
            plugin_only=True,
        ),
        roots,
    )


def labelling_agent(roots: HostRoots, settings: Settings) -> NodeOptions:
    """Return the options of an agent that only labels; all GPUs are for containers, whatever `settings` say."""
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


def plugin_only_settings(config: Path | None) -> Settings:
    """Return the settings; raise ConfigError for one that an unprivileged agent can't follow."""
    settings = options.read_settings(config)
    if settings.cdi is CdiUse.ANSWERS:
        raise ConfigError(
            "answers can't name CDI devices with --plugin-only, which writes no CDI specs; expected none or files",
            where=str(config),
            path="$.cdi",
        )
    if settings.manages:
        raise ConfigError(
            "drivers of GPUs can't be changed with --plugin-only, which may not write to the host; expected unmanaged",
            where=str(config),
            path="$.mode" if settings.mode is not DesiredMode.UNMANAGED else "$.modes",
        )
    return settings


def _offering(agent: NodeOptions, roots: HostRoots) -> NodeOptions:
    """Return the options with what an agent that offers devices reads of the runtime and of the driver."""
    return replace(
        agent,
        cdi_folders=(roots.system / "etc/cdi",),
        cdi_enabled=lambda: enables_cdi(read_runtimes(RealKernel(HostRoots.under(roots.system)))),
        system_root=roots.system,
        driver_root=roots.run / "nvidia/driver",
    )


def _pods(roots: HostRoots, kubelet: KubeletPaths) -> Path | None:
    """Return the folder of the kubelet's pods, which the agent sees below the host's `/`."""
    usual = KubeletPaths(Path("/var/lib/kubelet"))
    return roots.system / usual.pods.relative_to("/") if kubelet == usual else None
