"""Options that several commands share, and the readers of the files that they name."""

import os
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from gpuvirt import documents
from gpuvirt.cli.formats import ListOutput, Output
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.facts.ids import ResourceName, parse_resource_name
from gpuvirt.logs import LogFormat
from gpuvirt.model.desired import settings
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import Deferred, PciIds, Texts
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths

SYSTEM_PCI_IDS = (
    HostPath("/usr/share/misc/pci.ids"),
    HostPath("/usr/share/hwdata/pci.ids"),
    HostPath("/usr/share/pci.ids"),
)


HostRoot = Annotated[
    Path,
    typer.Option(
        envvar="GPUVIRT_HOST_ROOT",
        exists=True,
        file_okay=False,
        metavar="DIR",
        help="Folder where the host's / is mounted: DIR/sys, DIR/dev, DIR/proc and so on.",
    ),
]
DRIVER_ROOT = Path("/run/nvidia/driver")


def system_root(text: str) -> OptionInfo:
    """Return the option of the folder with the host's programs, with its help."""
    found: OptionInfo = typer.Option(
        "--system-root", envvar="GPUVIRT_SYSTEM_ROOT", exists=True, file_okay=False, metavar="DIR", help=text
    )
    return found


SystemRoot = Annotated[
    Path | None,
    system_root(
        "Folder where the host's /usr and /lib are mounted, for modprobe and kernel modules. Default: --host-root."
    ),
]
DriverSystemRoot = Annotated[
    Path, system_root("Folder where the host's / is mounted, for a driver that is installed on the host.")
]
DriverRoot = Annotated[
    Path,
    typer.Option(
        envvar="GPUVIRT_DRIVER_ROOT",
        file_okay=False,
        metavar="DIR",
        help="Folder where the root of the driver's container is mounted.",
    ),
]
KubeletDir = Annotated[
    Path,
    typer.Option(envvar="GPUVIRT_KUBELET_DIR", file_okay=False, metavar="DIR", help="The kubelet's folder."),
]
KubeletDirOfHost = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_KUBELET_DIR",
        file_okay=False,
        metavar="DIR",
        help="The kubelet's folder. Default: /var/lib/kubelet below --host-root.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(envvar="GPUVIRT_CONFIG", metavar="FILE", help="YAML file of settings (docs/reference/settings.md)."),
]
PciIdsFile = Annotated[
    Path | None,
    typer.Option(
        "--pci-ids",
        envvar="GPUVIRT_PCI_IDS",
        metavar="FILE",
        help="A pci.ids file to use in place of gpuvirt's and the system's.",
    ),
]
KubeVirtFile = Annotated[
    str | None,
    typer.Option(
        "--kubevirt",
        metavar="FILE",
        help="Output of `kubectl get kubevirt -A -o yaml`, to check it too; - for standard input.",
    ),
]


def cluster_file(text: str) -> OptionInfo:
    """Return the option of a kubeconfig that KUBECONFIG does not set, with its help."""
    found: OptionInfo = typer.Option("--kubeconfig", dir_okay=False, metavar="FILE", help=text)
    return found


ClusterFile = Annotated[Path | None, cluster_file("Kubeconfig of the cluster whose KubeVirt is checked.")]
AssumeUnallocated = Annotated[
    bool,
    typer.Option(
        "--assume-unallocated",
        envvar="GPUVIRT_ASSUME_UNALLOCATED",
        help="If the kubelet's allocations can't be read, assume that no device is allocated beyond the known ones."
        " A pod that has such a device loses it.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the steps, and change nothing.")]
GpuAddresses = Annotated[
    list[str] | None,
    typer.Argument(metavar="ADDRESS...", help="PCI addresses of GPUs: 0000:65:00.0. Default: all GPUs."),
]
LogFormatOption = Annotated[LogFormat, typer.Option(envvar="GPUVIRT_LOG_FORMAT", help="Format of the log.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]
SharedResource = Annotated[
    str, typer.Option("--resource", metavar="NAME", help="Name of the resource that stands for units of GPUs.")
]
SharedUnits = Annotated[int, typer.Option("--units", min=1, metavar="NUMBER", help="Units of a whole GPU.")]
OutputFormat = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
ListFormat = Annotated[
    ListOutput,
    typer.Option(
        "--output", "-o", help="Output format. wide shows all columns; name prints names that other commands accept."
    ),
]
NoHeaders = Annotated[bool, typer.Option("--no-headers", help="Print only the rows, without headings and other text.")]

LEDGER = HostPath("/var/lib/gpuvirt/ledger.json")
ROOT = Path("/")
KUBELET = HostPath("/var/lib/kubelet")
KUBELET_DIR = Path(KUBELET)


def plugin_only_ledger(kubelet: KubeletPaths) -> Path:
    """Return the ledger of a plugin-only agent: of its pod's two mounts, only this folder keeps files."""
    return kubelet.device_plugins / "gpuvirt" / "ledger.json"


def check_folder(path: Path) -> None:
    """Raise ConfigError if the folder of an output file does not exist; its name may be mistyped."""
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist; create it, or name another", where="--output")


def read_settings(config: Path | None) -> Settings:
    """Return the settings of a file, the defaults without a file; raise ConfigError."""
    if config is None:
        return Settings()
    return settings.check(documents.load(config, Settings), where=str(config))


def read_pci_ids(override: Path | None, roots: HostRoots) -> PciIds:
    """Return the pci.ids databases; raise ConfigError if `override` is invalid."""
    if override is not None:
        return PciIds((_pci_ids_of(override),))
    return PciIds((pciids.shipped(), Deferred(lambda: _system_pci_ids(roots))))


def _system_pci_ids(roots: HostRoots) -> Texts:
    """Return the system's database; only ids that gpuvirt's lacks need it, so an invalid one is ignored."""
    path = next((path for name in SYSTEM_PCI_IDS if (path := roots.local(name)).is_file()), None)
    if path is None:
        return {}
    try:
        return _pci_ids_of(path)
    except ConfigError as error:
        typer.echo(f"gpuvirt: the system's pci.ids is ignored: {error}", err=True)
        return {}


def _pci_ids_of(path: Path) -> Texts:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", where=str(path)) from error
    return pciids.parse(text, where=str(path))


LISTEN = ":9410"
LISTEN_VARIABLE = "GPUVIRT_LISTEN"


def _listen() -> str:
    """Return the default of --listen: nothing where the variable is set and empty, which Click treats as unset."""
    return "" if os.environ.get(LISTEN_VARIABLE) == "" else LISTEN  # noqa: TID251  Click hides an empty variable


ListenOption = Annotated[
    str,
    typer.Option(
        envvar=LISTEN_VARIABLE,
        metavar="ADDRESS:PORT",
        default_factory=_listen,
        show_default=LISTEN,
        help="Address of metrics and probes; '' serves none.",
    ),
]
"""The option of the processes that run on each node."""


def address_of(text: str, option: str = "--listen") -> tuple[str, int] | None:
    """Return the address in `host:port`, `:port` or `[::1]:port`; None for an empty text. Raises ConfigError."""
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected ADDRESS:PORT, as in :9410 or 127.0.0.1:9410, got {text!r}", where=option)
    return host.strip("[]"), int(port)


def resource_of(text: str) -> ResourceName:
    """Return the resource of the option --resource; raise ConfigError."""
    try:
        return parse_resource_name(text)
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--resource") from error
