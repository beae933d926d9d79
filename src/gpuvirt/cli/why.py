"""`gpuvirt why`: the way of one device to a virtual machine, and the one thing that is in it."""

from typing import Annotated

import typer

from gpuvirt.cli import apiserver, options
from gpuvirt.cli.options import Output


def why(  # noqa: PLR0913  one parameter an option
    target: Annotated[
        str, typer.Argument(metavar="ADDRESS|RESOURCE", help="A PCI address, a vGPU's UUID, or a resource's name.")
    ],
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
) -> None:
    """Walk one GPU's way to a virtual machine, stage by stage, and name the one thing that blocks it.

    Ends with 0 when a machine can have it now, with 1 when something blocks it. Of a resource, the way is that of the
    device that gets furthest.
    """
    from gpuvirt.apps.doctor import gather
    from gpuvirt.cli import diagnosis
    from gpuvirt.cli.machine import KubeVirtAt, Where, surroundings
    from gpuvirt.cli.render import json_lines
    from gpuvirt.model.target import is_target
    from gpuvirt.model.walk import walk

    if not is_target(target):
        raise typer.BadParameter(
            f"{target!r} is none; expected 0000:65:00.0, an mdev's UUID, or nvidia.com/GA102GL_A10",
            param_hint="ADDRESS|RESOURCE",
        )
    where = Where(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    way = walk(gather(kernel, around), target)
    if output is Output.JSON:
        json_lines(way)
    else:
        diagnosis.way(way)
    raise typer.Exit(1 if way.blocker is not None else 0)
