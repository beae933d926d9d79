"""`gpuvirt doctor`: checks of a host, from its firmware to KubeVirt, and the inputs that `gpuvirt why` has, too."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuvirt.agent import published
from gpuvirt.agent.change.typenames import asking
from gpuvirt.agent.known import snapshot
from gpuvirt.cli.evidence import EvidenceSources, diagnose
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import diagnosisrender
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.podaccount import AllocationReader
from gpuvirt.clock import RealClock
from gpuvirt.diagnosis.clusterreading import ask_cluster
from gpuvirt.diagnosis.evidence import ClusterNode
from gpuvirt.documents import MOST_BYTES
from gpuvirt.errors import ConfigError
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.model.kubevirt.kubevirt import KubeVirt, parse
from gpuvirt.model.reasons.codes import Level
from gpuvirt.paths import HostRoots, KubeletPaths

STANDARD_INPUT = "-"


class HostFolders(msgspec.Struct, frozen=True):
    """Where the host's folders are mounted, from the options of these names."""

    host_root: Path
    system_root: Path | None
    kubelet_dir: Path | None


class KubeVirtAt(msgspec.Struct, frozen=True):
    """The source of KubeVirt's configuration: a file or a cluster. Without either, it is not checked."""

    file: str | None = None
    """The output of `kubectl get kubevirt -A -o yaml`; `-` for standard input."""
    kubeconfig: Path | None = None
    context: str = ""
    """The context of the kubeconfig; empty for its current context."""


def surroundings(
    where: HostFolders, config: Path | None, pci_ids: Path | None, kubevirt: KubeVirtAt
) -> tuple[RealKernel, EvidenceSources]:
    """Return the host and the other inputs that a command's options name; raise ConfigError."""
    roots = HostRoots.under(where.host_root, where.system_root)
    kubelet = KubeletPaths(where.kubelet_dir or roots.local(options.KUBELET))
    kubevirts, nodes = _of_cluster(kubevirt)
    kernel, ledgers = RealKernel(roots), (roots.local(options.LEDGER), options.plugin_only_ledger(kubelet))
    return kernel, EvidenceSources(
        kubelet=kubelet,
        settings=options.read_settings(config),
        ids=options.read_pci_ids(pci_ids, roots),
        clock=RealClock(),
        ledger=snapshot.read_ledger(*ledgers),
        account=AllocationReader(kernel, roots, kubelet, ledgers),
        state_file=roots.run / published.VIEW_FILE,
        # An agent of a simulated host runs in this host's /proc.
        procs=(roots.proc, HostRoots.under(options.ROOT).proc),
        learn=asking(roots),
        kubevirts=kubevirts,
        cluster_nodes=nodes,
    )


def _of_cluster(at: KubeVirtAt) -> tuple[tuple[KubeVirt, ...] | None, tuple[ClusterNode, ...] | None]:
    """Return the cluster's KubeVirts, and its nodes; None for what is not known."""
    if at.file is not None and at.kubeconfig is not None:
        raise ConfigError("give one of --kubevirt and --kubeconfig", where="--kubeconfig")
    if at.kubeconfig is not None:
        return ask_cluster(at.kubeconfig, at.context)
    if at.context:
        raise ConfigError("names a context of a kubeconfig; expected --kubeconfig, too", where="--context")
    return (_read_kubevirts(at.file) if at.file is not None else None), None


def _read_kubevirts(name: str) -> tuple[KubeVirt, ...]:
    where = "standard input" if name == STANDARD_INPUT else name
    try:
        if name == STANDARD_INPUT:
            content = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=where) from error
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}", where=where) from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"is too large; expected at most {MOST_BYTES >> 20} MiB", where=where)
    return parse(text, where=where)


def doctor(  # noqa: PLR0913  one parameter an option
    *,
    host_root: options.HostRoot = options.ROOT,
    system_root: options.SystemRoot = None,
    kubelet_dir: options.KubeletDirOfHost = None,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    kubevirt: options.KubeVirtFile = None,
    kubeconfig: options.ClusterFile = None,
    context: apiserver.ContextOption = "",
    output: options.OutputFormat = Output.TABLE,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Show all findings in full, also those that are ok.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if no finding is an error, but not all are ok.")
    ] = False,
) -> None:
    """Find the problems that keep the GPUs of this host from VMs.

    The checks cover firmware, IOMMU, drivers, GPUs, vGPUs, the kubelet and KubeVirt. Each finding names its place, the
    reason why it matters, and a fix; the most harmful comes first. The command changes nothing. It exits with 1 if a
    finding is an error, and with 0 otherwise.
    """
    where = HostFolders(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    report = diagnose(kernel, around)
    if not print_document(report, output):
        diagnosisrender.report(report, every=every)
    raise typer.Exit(1 if report.level is Level.ERROR else 2 if strict and report.level is not Level.OK else 0)
