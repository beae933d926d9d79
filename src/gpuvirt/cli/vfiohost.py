"""The host that a command is about: its devices, what pods have of them, and what its agent keeps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from gpuvirt.cli import options
from gpuvirt.cli.inworker import ChangeSite
from gpuvirt.cli.podaccount import PodAccount
from gpuvirt.clock import RealClock
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, parse_pci_address
from gpuvirt.hardware.kernel import RealKernel
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import NodeView
from gpuvirt.node.change.inputs import Inputs
from gpuvirt.node.change.site import Site, site_of
from gpuvirt.node.known import snapshot
from gpuvirt.node.published import statefile
from gpuvirt.paths import HostRoots, KubeletPaths


@dataclass(frozen=True, slots=True)
class Host:
    """The host that a command is about."""

    site: Site
    inputs: Inputs
    managed: Mapping[PciAddress, str]
    """The modes that the agent keeps GPUs in."""
    vgpu_configs: Mapping[PciAddress, str]
    """The vGPU configs that the agent keeps applied."""
    agent_folder: Path
    """The folder that an agent of this host locks."""

    @property
    def change_site(self) -> ChangeSite:
        """Where devices are changed."""
        return ChangeSite(self.site, self.inputs, self.agent_folder)


def account(roots: HostRoots, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> PodAccount:
    """Return who tells what pods have of the host that is meant."""
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    ledgers = (roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return PodAccount(RealKernel(roots), roots, kubelet, ledgers, assume_unallocated)


def host(account: PodAccount, *, also: Iterable[str] = (), force: bool = False) -> Host:
    """Return the host that is meant, with what its agent keeps."""
    site = site_of(account.kernel, account.roots)
    view = _view(account.roots, account.kubelet, site)
    managed = {gpu.address: gpu.desired for gpu in view.gpus if gpu.desired is not None and view.agent is not None}
    vgpu_configs = {gpu.address: gpu.vgpu_config for gpu in view.gpus if gpu.vgpu_config is not None}
    names = snapshot.read_ledger(*account.ledgers).type_names
    inputs = Inputs(account.account, names, frozenset(parsed(also)), force, readings=account.readings)
    return Host(site, inputs, managed, vgpu_configs, account.roots.local(options.LEDGER).parent)


def _view(roots: HostRoots, kubelet: KubeletPaths, site: Site) -> NodeView:
    """Return the agent's picture, or one taken now, with what pods had by its ledger."""
    clock = RealClock()
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = statefile.read(roots.run / statefile.FILE, clock.now(), snapshot.boot_id(site.kernel), procs)
    if view is not None:
        return view
    ledger = snapshot.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return snapshot.take(site.kernel, Settings(), options.read_pci_ids(None, roots), clock, ledger)


def parsed(texts: Iterable[str]) -> Iterable[PciAddress]:
    """Yield the addresses in what was typed; raise BadParameter for what is none."""
    for text in texts:
        try:
            yield parse_pci_address(text)
        except InvalidIdError as error:
            raise typer.BadParameter(str(error)) from error
