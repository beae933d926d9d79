"""`gpuvirt doctor`: checks of a host, from its firmware to KubeVirt."""

from typing import Annotated

import typer

from gpuvirt.cli.diagnosis.evidencehost import HostFolders, KubeVirtAt, surroundings
from gpuvirt.cli.evidence import diagnose
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import diagnosisrender
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.model.reasons.codes import Level


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
    every: Annotated[bool, typer.Option("--all", "-a", help="Also show findings that are ok.")] = False,
) -> None:
    """Find the problems that keep the GPUs of this host from VMs.

    The checks cover firmware, IOMMU, drivers, GPUs, vGPUs, the kubelet and KubeVirt. Each finding names its place, the
    reason why it matters, and a fix. The command changes nothing. It exits with 1 if a finding is an error.
    """
    where = HostFolders(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    report = diagnose(kernel, around)
    if not print_document(report, output):
        diagnosisrender.report(report, every=every)
    raise typer.Exit(1 if report.level is Level.ERROR else 0)
