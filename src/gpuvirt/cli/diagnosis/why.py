"""`gpuvirt why`: the finding that keeps a device from VMs, a VM or pod from its devices, or pods from a node."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from gpuvirt.cli.diagnosis.doctor import HostFolders, KubeVirtAt, surroundings
from gpuvirt.cli.evidence import address_of, gather
from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.diagnosisrender import explanation, print_blocker, print_stages
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, completion, options
from gpuvirt.diagnosis.clusterreading import ask, ask_node
from gpuvirt.diagnosis.explaining import explain_device
from gpuvirt.diagnosis.sharesreading import verify_resource
from gpuvirt.diagnosis.target import is_target, joined_target, node_target, object_target
from gpuvirt.diagnosis.vms import vmexplanation
from gpuvirt.diagnosis.vms.vmevidence import ObjectKind, ObjectRef
from gpuvirt.diagnosis.vms.vmexplanation import Explanation, NodeExplanation, explain_node
from gpuvirt.diagnosis.vms.vmfindings import counts_text, requests_text
from gpuvirt.errors import InvalidIdError
from gpuvirt.facts.ids import NodeName, ObjectName, ResourceName
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import ForbiddenError
from gpuvirt.model.offers.ondemand.typesannotation import with_type
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.shares.sharing import Sharing

ClusterFile = Annotated[
    Path | None,
    options.cluster_file(
        "Kubeconfig of the cluster: of the VM or pod, or of the KubeVirt that is checked for a device."
    ),
]
VM_COLUMNS = (Column("NODE"), Column("RESOURCE", folds=True), Column("ALLOCATABLE"), Column("FREE"), Column("REASON"))
RESOURCE_COLUMNS = (Column("RESOURCE"), Column("ALLOCATABLE"), Column("FREE"))
POD_COLUMNS = (Column("PENDING POD"), Column("REQUESTS", folds=True), Column("REASON", optional=True))
TARGETS = "ADDRESS|UUID|RESOURCE|vm/NAME|vmi/NAME|pod/NAME|claim/NAME|node/NAME"


def why(  # noqa: PLR0913  one parameter an option
    target: Annotated[
        str,
        typer.Argument(
            metavar=TARGETS,
            autocompletion=completion.node_targets,
            help="A PCI address, a UUID or a resource on this host, or a VM, VMI, pod, claim or node of the cluster.",
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
    """Explain why no VM can use a GPU, or why a VM lacks its GPUs.

    For a PCI address, a UUID (of an mdev, or `GPU-...`) or a resource, the command checks this host, and prints the
    stages between the GPU and a VM. For a resource, it follows the device that passes the most stages. For vm/NAME (or
    vm NAME), vmi/NAME, pod/NAME or claim/NAME (DRA), it reads the cluster of --kubeconfig, KUBECONFIG or
    ~/.kube/config, and prints the requested devices, the scheduler's message, and what blocks the pod on each node.
    For node/NAME, it prints the node's resources, the reasons of its GPUs, and the pending pods that request them,
    each with its obstacle.

    It exits with 0 if nothing blocks the device, VM or pod, with 1 otherwise.
    """
    chosen = _target_of(target, name)
    if chosen.node is not None:
        credentials = apiserver.asked_credentials(kubeconfig, context)
        _explain_node(chosen.node, credentials, output, _sharing(resource, units, credentials))
        return
    if chosen.found is not None:
        credentials = apiserver.asked_credentials(kubeconfig, context)
        _explain_vm(chosen.found, credentials, namespace, output, _sharing(resource, units, credentials))
        return
    where = HostFolders(host_root, system_root, kubelet_dir)
    kernel, around = surroundings(where, config, pci_ids, KubeVirtAt(kubevirt, kubeconfig, context))
    found = explain_device(gather(kernel, around), address_of(kernel, chosen.text) or chosen.text)
    if not print_document(found, output):
        explanation(found)
    raise typer.Exit(1 if found.blocker is not None else 0)


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


def _sharing(resource: str, units: int, credentials: Credentials) -> Sharing:
    """Return how the cluster shares GPUs; raise NoSuchResourceError for another resource than its nodes have."""
    sharing = Sharing(options.resource_of(resource), Units(units))
    if sharing.resource != UNITS_RESOURCE:  # the default need not exist: the cluster may share no GPUs
        with suppress(ForbiddenError):  # unknown: the nodes are reported as unread where they matter
            asyncio.run(verify_resource(Client(credentials), sharing.resource))
    return sharing


def _explain_vm(
    target: tuple[ObjectKind, ObjectName],
    credentials: Credentials,
    namespace: str,
    output: Output,
    sharing: Sharing,
) -> None:
    """Explain why a VM, a VMI or a pod does not have its GPUs; exit with 1 if something blocks it."""
    kind, name = target
    found = vmexplanation.explain(
        ask(credentials, ObjectRef(kind, name, apiserver.own_namespace(namespace, credentials)), sharing)
    )
    if not print_document(found, output):
        show_vm(found)
    raise typer.Exit(1 if found.blocker is not None else 0)


def show_vm(found: Explanation) -> None:
    """Print what blocks a VM, the stages, and the nodes."""
    out = console()
    kind, _, name = found.target.partition("/")
    has_requests = found.requests or (found.claims and kind != ObjectKind.CLAIM)
    requests = f" requests {requests_text(found.requests, found.claims)}" if has_requests else ""
    say(out, f"{kind} {found.namespace}/{name}{requests}", style="bold")
    out.print()
    if found.blocker is None:
        say(out, f"The {kind} has its devices.", style="green")
    else:
        print_blocker(out, found.blocker)
    out.print()
    print_stages(out, found.stages, width=10)
    if found.scheduler:
        out.print()
        say(out, found.scheduler, head="the scheduler reports: ")
    if found.nodes:
        out.print()
        _vm_nodes(found).print(out)
    for unread in found.unread:
        say(out, unread, head="could not be read: ", style="yellow")


def _vm_nodes(found: Explanation) -> Table:
    table = Table(VM_COLUMNS, below="MESSAGE")
    for verdict in found.nodes:
        obstacle = verdict.obstacle
        code = Text("none", style="green") if obstacle is None else Text(str(obstacle.code), style="yellow")
        below = () if obstacle is None else (f"{obstacle.subject} {obstacle.message}",)
        for number, resource in enumerate(found.requests):
            last = number == len(found.requests) - 1
            table.add(
                verdict.node,
                with_type(resource, verdict.types.get(ResourceName(resource))),
                str(verdict.allocatable[resource]),
                NOTHING if verdict.free is None else str(verdict.free[resource]),
                code if number == 0 else "",
                below=below if last else (),
            )
    return table


def _explain_node(node: str, credentials: Credentials, output: Output, sharing: Sharing) -> None:
    """Explain what a node has, and what is pending there; exit with 1 if something is wrong."""
    found = explain_node(ask_node(credentials, node, sharing))
    if not print_document(found, output):
        _show_node(found)
    raise typer.Exit(1 if found.is_blocked else 0)


def _show_node(found: NodeExplanation) -> None:
    """Print the node's resources, its reasons, and the pods that are pending."""
    out = console()
    _print_head(out, found)
    resources = Table(RESOURCE_COLUMNS)
    for resource in found.resources:
        free = NOTHING if resource.free is None else str(resource.free)
        name = with_type(resource.name, resource.type)
        resources.add(name, str(resource.allocatable), free, below=filter(None, (resource.reason,)))
    if found.resources:
        out.print()
        resources.print(out)
    for reason in found.reasons:
        say(out, reason)
    out.print()
    if found.pending is None:
        say(out, "The cluster's pods could not be read, so pending pods are not known.", style="yellow")
    elif not found.pending:
        say(out, "No pod with a device of this node is pending.", style="green")
    else:
        pods = Table(POD_COLUMNS, below="MESSAGE")
        types = {resource.name: resource.type for resource in found.resources}
        for pod in found.pending:
            requests = {with_type(name, types.get(name)): count for name, count in pod.requests.items()}
            pods.add(f"{pod.namespace}/{pod.name}", counts_text(requests), pod.code or NOTHING, below=(pod.message,))
        pods.print(out)


def _print_head(out: Console, found: NodeExplanation) -> None:
    """Print what concerns the whole node."""
    say(out, f"node {found.node} is {'Ready' if found.ready else 'not Ready'} for Kubernetes", style="bold")
    if found.away is not None:
        say(out, f"It {found.away}, so none of its devices are free.", style="yellow")
    for phase in found.phases:
        say(out, f"It {phase}.")
    if found.sharing is not None:
        say(out, f"Enforcement of the shares of new pods: {found.sharing}.")
    if not found.has_agent:
        because = found.no_agent_because or "gpuvirt's agent has not reported there"
        say(out, f"It has no GpuNode: {because}.", style="yellow")
    elif found.no_agent_because:
        say(out, f"No agent runs there, and its GpuNode is outdated: {found.no_agent_because}.", style="yellow")
