"""`gpuvirt doctor`: what is wrong on the way from firmware to virtual machine, where it is seen, and what mends it."""

from typing import Annotated

import typer

from gpuvirt.apps.doctor import diagnose
from gpuvirt.cli import apiserver, diagnosis, options
from gpuvirt.cli.evidencehost import KubeVirtAt, Where, surroundings
from gpuvirt.cli.options import Output
from gpuvirt.cli.render import json_lines
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
    every: Annotated[bool, typer.Option("--all", "-a", help="Show what is in order, too.")] = False,
) -> None:
    """Check the way from firmware to virtual machine: what is wrong, where it is seen, why it matters, what mends it.

    Nothing is changed. Ends with 1 when something can't work as the host is set up, with 0 otherwise.
    """
    where = Where(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    report = diagnose(kernel, around)
    if output is Output.JSON:
        json_lines(report)
    else:
        diagnosis.report(report, every=every)
    raise typer.Exit(1 if report.level is Level.ERROR else 0)
