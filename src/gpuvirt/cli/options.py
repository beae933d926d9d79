"""Options that several commands share, and what they turn into."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt import documents
from gpuvirt.apps.logs import LogFormat
from gpuvirt.errors import ConfigError
from gpuvirt.model.desired import settings, vgpuconfig
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.settings import Settings
from gpuvirt.model.inventory import pciids
from gpuvirt.model.inventory.pciids import Deferred, PciIds, Texts
from gpuvirt.paths import HostPath, HostRoots, KubeletPaths

SYSTEM_PCI_IDS = (
    HostPath("/usr/share/misc/pci.ids"),
    HostPath("/usr/share/hwdata/pci.ids"),
    HostPath("/usr/share/pci.ids"),
)


class Output(StrEnum):
    """How a command answers."""

    TABLE = "table"
    JSON = "json"


HostRoot = Annotated[
    Path,
    typer.Option(
        envvar="GPUVIRT_HOST_ROOT",
        exists=True,
        file_okay=False,
        metavar="DIR",
        help="Where the host's / is seen: DIR/sys, DIR/dev, DIR/proc and so on.",
    ),
]
SystemRoot = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_SYSTEM_ROOT",
        exists=True,
        file_okay=False,
        metavar="DIR",
        help="Where the host's /usr and /lib are seen, for modprobe and the kernel's modules; --host-root otherwise.",
    ),
]
KubeletDir = Annotated[
    Path,
    typer.Option(envvar="GPUVIRT_KUBELET_DIR", file_okay=False, metavar="DIR", help="The kubelet's own folder."),
]
KubeletDirOfHost = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_KUBELET_DIR",
        file_okay=False,
        metavar="DIR",
        help="The kubelet's own folder; /var/lib/kubelet below --host-root unless it is given.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(envvar="GPUVIRT_CONFIG", metavar="FILE", help="Settings, a YAML file (docs/reference.md)."),
]
PciIdsFile = Annotated[
    Path | None,
    typer.Option(
        "--pci-ids",
        envvar="GPUVIRT_PCI_IDS",
        metavar="FILE",
        help="A pci.ids file to take names from, in place of gpuvirt's own and the system's.",
    ),
]
KubeVirtFile = Annotated[
    str | None,
    typer.Option(
        "--kubevirt",
        metavar="FILE",
        help="What `kubectl get kubevirt -A -o yaml` says, to be looked at too; - for standard input.",
    ),
]
ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        dir_okay=False,
        metavar="FILE",
        help="Ask the cluster that this file tells of for its KubeVirts.",
    ),
]
AssumeUnallocated = Annotated[
    bool,
    typer.Option(
        "--assume-unallocated",
        envvar="GPUVIRT_ASSUME_UNALLOCATED",
        help="Where the kubelet's account of its pods can't be read: take it that they have no more devices than is"
        " known. A pod that has one loses it.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the steps, and take none.")]
GpuAddresses = Annotated[
    list[str] | None, typer.Argument(metavar="ADDRESS...", help="These GPUs alone, by PCI address: 0000:65:00.0")
]
LogFormatOption = Annotated[LogFormat, typer.Option(envvar="GPUVIRT_LOG_FORMAT", help="How to log.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")]
OutputFormat = Annotated[Output, typer.Option("--output", "-o", help="How to answer.")]

LEDGER = HostPath("/var/lib/gpuvirt/ledger.json")
ROOT = Path("/")
KUBELET = HostPath("/var/lib/kubelet")
KUBELET_DIR = Path(KUBELET)


def plugin_only_ledger(kubelet: KubeletPaths) -> Path:
    """Return where a plugin-only agent keeps its ledger: a pod with two mounts has one place that outlives it."""
    return kubelet.device_plugins / "gpuvirt" / "ledger.json"


def check_folder(path: Path) -> None:
    """Raise ConfigError for a file to be written into a folder that is not there: a mistyped one is made by nobody."""
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write into; make it, or name another", where="--output")


def read_settings(config: Path | None) -> Settings:
    """Return the settings in a file, the defaults without one; raise ConfigError."""
    if config is None:
        return Settings()
    return settings.check(documents.load(config, Settings), where=str(config))


def read_vgpu_configs(settings: Settings) -> ConfigText | None:
    """Return the vGPU configs of the settings' file, None where they name none; raise ConfigError."""
    if settings.vgpu_config_file is None:
        return None
    text = documents.text_of(Path(settings.vgpu_config_file))
    vgpuconfig.parse(text, where=settings.vgpu_config_file)
    return ConfigText(text, settings.vgpu_config_file)


def read_pci_ids(override: Path | None, roots: HostRoots) -> PciIds:
    """Return the databases that name devices; raise ConfigError for one that was named and is none."""
    if override is not None:
        return PciIds((_pci_ids_of(override),))
    return PciIds((pciids.shipped(), Deferred(lambda: _system_pci_ids(roots))))


def _system_pci_ids(roots: HostRoots) -> Texts:
    """Return the system's database; it is asked for unknown ids alone, so a bad one is passed over."""
    path = next((path for name in SYSTEM_PCI_IDS if (path := roots.local(name)).is_file()), None)
    if path is None:
        return {}
    try:
        return _pci_ids_of(path)
    except ConfigError as error:
        typer.echo(f"gpuvirt: the system's database is passed over: {error}", err=True)
        return {}


def _pci_ids_of(path: Path) -> Texts:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from error
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", where=str(path)) from error
    return pciids.parse(text, where=str(path))
