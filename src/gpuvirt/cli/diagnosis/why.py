"""`gpuvirt why`: the finding that keeps a device from VMs, a VM or pod from its devices, or pods from a node."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gpuvirt.apps.doctor import address_of, gather
from gpuvirt.cli.diagnosis import whynode, whyvm
from gpuvirt.cli.diagnosis.evidencehost import HostFolders, KubeVirtAt, surroundings
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output import diagnosisrender
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.parameters import apiserver, completion, options
from gpuvirt.cluster.shares.sharing import Sharing
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import NodeName, ObjectName
from gpuvirt.model.doctor.explaining import explain_device
from gpuvirt.model.doctor.target import is_target, joined_target, node_target, object_target
from gpuvirt.model.doctor.vms.vmevidence import ObjectKind
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE

ClusterFile = Annotated[
    Path | None,
    options.cluster_file(
        "Kubeconfig of the cluster: of the VM or pod, or of the KubeVirt that is checked for a device."
    ),
]
TARGETS = "ADDRESS|UUID|RESOURCE|vm/NAME|vmi/NAME|pod/NAME|node/NAME"


def why(  # noqa: PLR0913  one parameter an option
    target: Annotated[
        str,
        typer.Argument(
            metavar=TARGETS,
            autocompletion=completion.node_targets,
            help="A PCI address, a UUID or a resource on this host, or a VM, VMI, pod or node of the cluster.",
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The object's name, after its kind: vm NAME.", show_default=False),
    ] = None,
    *,
    namespace: Annotated[
        str,
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAME",
            help="Namespace of the VM or pod. Default: that of the kubeconfig's context.",
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
    resource: options.SharedResource = UNITS_RESOURCE,
    units: options.SharedUnits = WHOLE,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Explain what keeps a GPU from VMs, or a VM from its GPUs.

    For a PCI address, a UUID (of an mdev, or `GPU-...`) or a resource, the command checks this host, and prints the
    stages between the GPU and a VM. Of a resource, it takes the device that passes most stages. For vm/NAME (or vm
    NAME), vmi/NAME or pod/NAME, it reads the cluster of --kubeconfig, KUBECONFIG or ~/.kube/config, and prints the
    requested devices, the scheduler's message, and what blocks the pod on each node. For node/NAME, it prints the
    node's resources, the reasons of its GPUs, and the pending pods that request what the node has, with what blocks
    each.

    It exits with 0 if nothing blocks the device, VM or pod, with 1 otherwise.
    """
    chosen = _target_of(target, name)
    if chosen.node is not None:
        credentials = apiserver.asked_credentials(kubeconfig, context)
        whynode.explain(chosen.node, credentials, output, options.resource_of(resource))
        return
    if chosen.found is not None:
        sharing = Sharing(options.resource_of(resource), Units(units))
        whyvm.explain(chosen.found, apiserver.asked_credentials(kubeconfig, context), namespace, output, sharing)
        return
    where = HostFolders(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    explanation = explain_device(gather(kernel, around), address_of(kernel, chosen.text) or chosen.text)
    if not print_document(explanation, output):
        diagnosisrender.explanation(explanation)
    raise typer.Exit(1 if explanation.blocker is not None else 0)


class _Target(msgspec.Struct, frozen=True):
    """The target that a command line names: a device or a resource as text, else a node or another object."""

    text: str
    node: NodeName | None = None
    found: tuple[ObjectKind, ObjectName] | None = None


def _target_of(text: str, name: str | None) -> _Target:
    """Return the target of the words of a command line; raise BadParameter, ConfigError if it is invalid."""
    whole = joined_target(text, name)
    try:
        target = _Target(whole, node_target(whole), object_target(whole))
    except InvalidIdError as error:
        raise typer.BadParameter(str(error), param_hint=TARGETS) from error
    if target.node is None and target.found is None and not is_target(whole):
        raise typer.BadParameter(
            f"{whole!r} is not valid; expected 0000:65:00.0, a UUID, nvidia.com/GA102GL_A10, or vm/vm-a",
            param_hint=TARGETS,
        )
    return target
