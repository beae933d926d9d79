"""`gpuvirt support`: what somebody else needs to see of this host, in one file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli import options
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.hardware import attributes
from gpuvirt.hardware.kernel import RealKernel
from gpuvirt.model.desired.settings import Settings
from gpuvirt.node.store.files import replace_file
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths
from gpuvirt.support import sections as archive
from gpuvirt.support.packing import Asked

HOSTNAME = HostPath("/proc/sys/kernel/hostname")
STANDARD_OUTPUT = Path("-")


def support(  # noqa: PLR0913  one parameter an option
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where to write, - for standard output; gpuvirt-support-<node>-<time>.tar.gz here without it.",
        ),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A log of gpuvirt's to pack; may be given again. The agent's: kubectl logs."),
    ] = None,
    node_name: Annotated[
        str | None, typer.Option(envvar="GPUVIRT_NODE_NAME", metavar="NAME", help="The node's name; else the host's.")
    ] = None,
    hide_names: Annotated[
        bool, typer.Option("--hide-names", help="Call node, namespaces, pods and containers node-1, pod-1 and so on.")
    ] = False,
) -> None:
    """Pack what somebody else needs to see of this host into one archive: its GPUs, not its secrets.

    Nothing is written but the archive, and nothing is read that can hang or that acts when it is read. As root it sees
    more. `gpuvirt sim import` makes a simulated host of it.
    """
    if output == STANDARD_OUTPUT and sys.stdout.isatty():
        raise ConfigError("an archive is nothing to see on a terminal; name a file, or redirect it", where="--output")
    if len(log or ()) > archive.MOST_LOGS:
        raise ConfigError(f"expected at most {archive.MOST_LOGS} logs, got {len(log or ())}", where="--log")
    roots = HostRoots.under(host_root)
    kubelet, kernel = KubeletPaths(kubelet_dir or roots.local(options.KUBELET)), RealKernel(roots)
    hostname = attributes.text(kernel, HOSTNAME)
    asked = Asked(
        kernel=kernel,
        roots=roots,
        kubelet=kubelet,
        ledgers=(roots.local(options.LEDGER), options.plugin_only_ledger(kubelet)),
        settings=_settings(config),
        ids=options.read_pci_ids(pci_ids, roots),
        clock=RealClock(),
        nodes=tuple(name for name in (node_name, hostname) if isinstance(name, str) and name),
        config=config,
        logs=tuple(log or ()),
        hide_names=hide_names,
    )
    packed = archive.pack(asked)
    written = _write(packed.name, packed.content, output)
    # On standard error, as standard output may be the archive.
    typer.echo("\n".join(archive.report(packed, written)), err=True)


def _settings(config: Path | None) -> Settings:
    """Return the settings in a file, the defaults where it can't be used: that may be what is asked about."""
    try:
        return options.read_settings(config)
    except ConfigError as error:
        typer.echo(f"gpuvirt: the settings are packed, but are not used: {error}", err=True)
        return Settings()


def _write(name: str, content: bytes, output: Path | None) -> str:
    """Write an archive, and return where."""
    if output == STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        return "standard output"
    path = output or Path()
    path = path / f"{name}.tar.gz" if path.is_dir() else path
    options.check_folder(path)
    replace_file(path, content, durable=False)
    return str(path)
