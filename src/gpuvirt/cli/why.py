"""`gpuvirt why`: the one thing that keeps a device from virtual machines, or a VM or pod from its devices."""

from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.apps.doctor import gather
from gpuvirt.cli import apiserver, diagnosis, options, whyvm
from gpuvirt.cli.evidencehost import KubeVirtAt, Where, surroundings
from gpuvirt.cli.options import Output
from gpuvirt.cli.render import json_lines
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import ObjectName
from gpuvirt.model.doctor.explaining import walk
from gpuvirt.model.doctor.target import is_target, object_target
from gpuvirt.model.doctor.vms.vmevidence import ObjectKind

ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig",
        dir_okay=False,
        metavar="FILE",
        help="Kubeconfig of the cluster that has the VM or pod; of a device, the cluster whose KubeVirt is checked.",
    ),
]
TARGETS = "ADDRESS|RESOURCE|vm/NAME|vmi/NAME|pod/NAME"


def why(  # noqa: PLR0913  one parameter an option
    target: Annotated[
        str,
        typer.Argument(
            metavar=TARGETS,
            help="A PCI address, a vGPU's UUID, a resource's name; or a VM, VMI or pod of the cluster.",
        ),
    ],
    *,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Namespace of the VM or pod; without it that of the kubeconfig's context.",
        ),
    ] = "",
    host_root: options.HostRoot = options.ROOT,
    system_root: options.SystemRoot = None,
    kubelet_dir: options.KubeletDirOfHost = None,
    config: options.Config = None,
    pci_ids: options.PciIdsFile = None,
    kubevirt: options.KubeVirtFile = None,
    kubeconfig: ClusterFile = None,
    context: apiserver.ContextOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Name the one thing that keeps a GPU from a virtual machine, or a VM or pod from its GPUs, and what mends it.

    Of an address or a resource, this host is looked at: the stages of the way to a virtual machine; of a resource, that
    of the device that gets furthest. Of vm/NAME, vmi/NAME or pod/NAME, the cluster is asked, by --kubeconfig,
    KUBECONFIG or ~/.kube/config: what it requests, what the scheduler says, and what is in the way on each node.
    Ends with 0 when nothing is in the way, with 1 when something is.
    """
    if (found := _object_in(target)) is not None:
        whyvm.explain(found, apiserver.asked_credentials(kubeconfig, context), namespace, output)
        return
    where = Where(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    way = walk(gather(kernel, around), target)
    if output is Output.JSON:
        json_lines(way)
    else:
        diagnosis.way(way)
    raise typer.Exit(1 if way.blocker is not None else 0)


def _object_in(target: str) -> tuple[ObjectKind, ObjectName] | None:
    """Return the object that is meant, None for a device or a resource; raise BadParameter for what is nothing."""
    try:
        found = object_target(target)
    except InvalidIdError as error:
        raise typer.BadParameter(str(error), param_hint=TARGETS) from error
    if found is None and not is_target(target):
        raise typer.BadParameter(
            f"{target!r} is none; expected 0000:65:00.0, an mdev's UUID, nvidia.com/GA102GL_A10, or vm/vm-a",
            param_hint=TARGETS,
        )
    return found
