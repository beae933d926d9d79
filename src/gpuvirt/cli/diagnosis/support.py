"""`gpuvirt support`: an archive of a host's GPU state, for a bug report."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.agent.store.files import replace_file
from gpuvirt.cli.parameters import options
from gpuvirt.cli.support import sections as archive
from gpuvirt.cli.support.packing import ArchiveRequest
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.hardware.access import attributes
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.desired.settings import Settings
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths

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
            help="File to write, - for standard output. Default: gpuvirt-support-<node>-<time>.tar.gz.",
        ),
    ] = None,
    log: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A log of gpuvirt to pack, such as the output of kubectl logs. Repeatable."),
    ] = None,
    node_name: Annotated[
        str | None,
        typer.Option(envvar="GPUVIRT_NODE_NAME", metavar="NAME", help="The node's name. Default: the host's name."),
    ] = None,
    hide_names: Annotated[
        bool,
        typer.Option(
            "--hide-names", help="Replace the names of the node, namespaces, pods and containers by node-1, pod-1, ..."
        ),
    ] = False,
) -> None:
    """Pack the state of this host's GPUs into one archive.

    The archive is for a bug report, and has no secrets. The command writes only the archive, and reads no file that can
    block or that has side effects when it is read. It runs nvidia-smi, for at most 30 s, only if a vGPU has a type that
    no VF names. As root, it can read more files. `gpuvirt sim import` makes a simulated host from the archive.
    """
    if output == STANDARD_OUTPUT and sys.stdout.isatty():
        raise ConfigError("standard output is a terminal; name a file, or redirect standard output", where="--output")
    if len(log or ()) > archive.MOST_LOGS:
        raise ConfigError(f"expected at most {archive.MOST_LOGS} logs, got {len(log or ())}", where="--log")
    roots = HostRoots.under(host_root)
    kubelet, kernel = KubeletPaths(kubelet_dir or roots.local(options.KUBELET)), RealKernel(roots)
    hostname = attributes.text(kernel, HOSTNAME)
    asked = ArchiveRequest(
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
    # The report goes to standard error, as standard output may be the archive.
    typer.echo("\n".join(archive.report(packed, written)), err=True)


def _settings(config: Path | None) -> Settings:
    """Return the settings of a file, the defaults if it is invalid: it may be the problem that is reported."""
    try:
        return options.read_settings(config)
    except ConfigError as error:
        typer.echo(f"gpuvirt: the settings are packed, but not applied: {error}", err=True)
        return Settings()


def _write(name: str, content: bytes, output: Path | None) -> str:
    """Write an archive, and return the name of its file; raise ConfigError."""
    if output == STANDARD_OUTPUT:
        sys.stdout.buffer.write(content)
        return "standard output"
    path = output or Path()
    try:
        path = path / f"{name}.tar.gz" if path.is_dir() else path
        options.check_folder(path)
        replace_file(path, content, durable=False)
    except OSError as error:
        message = f"{path} can't be written: {error.strerror}; expected a file in a folder where you may write"
        raise ConfigError(message, where="--output") from error
    return str(path)
