"""The host of a command: its devices, their allocations to pods, and the modes that its agent keeps."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import typer

from gpuvirt.agent.change.changehost import ChangeHost, change_host_of
from gpuvirt.agent.change.inputs import Inputs
from gpuvirt.agent.known import snapshot
from gpuvirt.agent.published import statefile
from gpuvirt.cli.changes.inworker import CommandHost
from gpuvirt.cli.changes.podaccount import AllocationReader
from gpuvirt.cli.parameters import options
from gpuvirt.clock import RealClock
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import PciAddress, parse_pci_address
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.offers.view import GpuView, NodeView
from gpuvirt.model.reasons import Reason, ReasonCode
from gpuvirt.paths import HostRoots, KubeletPaths

UNFIT = frozenset(
    {
        ReasonCode.BOOT_CONSOLE,
        ReasonCode.FELL_OFF_BUS,
        ReasonCode.GRACE_DRIVER_MISSING,
        ReasonCode.GROUP_NOT_VIABLE,
        ReasonCode.NODE_MISSING,
        ReasonCode.UNREAD,
    }
)
"""Reasons for which a GPU on a VFIO driver is of no use to any VM. A GPU that is in use, or that its last VM has left
its memory in, is bound for VMs all the same."""


class Host(msgspec.Struct, frozen=True):
    """The host whose devices a command lists or changes."""

    change_host: ChangeHost
    inputs: Inputs
    managed: Mapping[PciAddress, str]
    """The modes that the agent keeps GPUs in."""
    unfit: Mapping[PciAddress, tuple[Reason, ...]]
    """Why a VM could not use a GPU that is bound for VMs, as `gpuvirt devices` prints it."""
    vgpu_configs: Mapping[PciAddress, str | None]
    """The vGPU configs that the agent keeps applied; None for a GPU without one."""
    agent_folder: Path
    """The folder that this host's agent locks."""

    @property
    def command_host(self) -> CommandHost:
        """The host, for a change of its devices."""
        return CommandHost(self.change_host, self.inputs, self.agent_folder)


def account(roots: HostRoots, kubelet_dir: Path | None, *, assume_unallocated: bool = False) -> AllocationReader:
    """Return the reader of a host's allocations."""
    kubelet = KubeletPaths(kubelet_dir or roots.local(options.KUBELET))
    ledgers = (roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return AllocationReader(RealKernel(roots), roots, kubelet, ledgers, assume_unallocated)


def host(
    account: AllocationReader, *, also: Iterable[str] = (), force: bool = False, require_reset: bool = True
) -> Host:
    """Return a host, with the modes and vGPU configs that its agent keeps."""
    change_host = change_host_of(account.kernel, account.roots, account.kubelet)
    view = _view(account.roots, account.kubelet, change_host)
    managed = {gpu.address: gpu.desired for gpu in view.gpus if gpu.desired is not None and view.agent is not None}
    unfit = {gpu.address: found for gpu in view.gpus if (found := _unfit(gpu))}
    vgpu_configs = {gpu.address: gpu.vgpu_config for gpu in view.gpus}
    names = snapshot.read_ledger(*account.ledgers).names
    allowed = frozenset(parsed(also))
    inputs = Inputs(account.account, names, allowed, force, require_reset, readings=account.readings)
    return Host(change_host, inputs, managed, unfit, vgpu_configs, account.roots.local(options.LEDGER).parent)


def _unfit(gpu: GpuView) -> tuple[Reason, ...]:
    return tuple(reason for reason in gpu.reasons if reason.code in UNFIT) if gpu.healthy is False else ()


def _view(roots: HostRoots, kubelet: KubeletPaths, change_host: ChangeHost) -> NodeView:
    """Return the agent's view of the node, or a new one with the allocations of the agent's ledger."""
    clock = RealClock()
    procs = (roots.proc, HostRoots.under(options.ROOT).proc)
    view = statefile.read(roots.run / statefile.FILE, clock.monotonic_s(), snapshot.boot_id(change_host.kernel), procs)
    if view is not None:
        return view
    ledger = snapshot.read_ledger(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return snapshot.take(change_host.kernel, Settings(), options.read_pci_ids(None, roots), clock, ledger)


def parsed(texts: Iterable[str]) -> Iterable[PciAddress]:
    """Yield PCI addresses; raise BadParameter for an invalid text."""
    for text in texts:
        try:
            yield parse_pci_address(text)
        except InvalidIdError as error:
            raise typer.BadParameter(str(error)) from error
