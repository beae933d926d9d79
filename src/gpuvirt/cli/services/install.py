"""`gpuvirt install` and `uninstall`: the commands of the chart's Jobs, the list of its images, and its check."""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt import __version__, documents
from gpuvirt.cli.formats import Layout, ListFormat, ListOutput
from gpuvirt.cli.output.render import print_list
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, fleet, options
from gpuvirt.clock import RealClock
from gpuvirt.controller.install import images as image_lists
from gpuvirt.controller.install import installing
from gpuvirt.controller.install.installing import Preview, preview
from gpuvirt.controller.install.uninstall import Goals, namespace_of, run
from gpuvirt.kube.client import Client


def uninstall(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: Annotated[
        str, apiserver.own_namespace_option("the pod's, else the one in the ClusterPolicy's status")
    ] = "",
    coexist: Annotated[
        bool,
        typer.Option("--coexist", envvar="GPUVIRT_COEXIST", help="Keep the labels that NVIDIA's operator uses, too."),
    ] = False,
    crds: Annotated[
        bool,
        typer.Option("--crds", help="Also delete gpuvirt's CustomResourceDefinitions, with all their objects."),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Uninstall although pods have shares of GPUs. Their containers keep running, but can't be restarted.",
        ),
    ] = False,
) -> None:
    """Remove gpuvirt's objects and labels from the cluster.

    The command removes operands, the discoverer, labels, entries in KubeVirt's configuration, GpuNodes, and the
    ClusterPolicy of the chart. It changes no device, and VMs keep theirs. It prints each removal, and the reason why an
    object is kept. If it is interrupted, run it again. While pods have shares of GPUs, it removes nothing, because
    containers with shares can restart only while agents run.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    # Another namespace would leave the controller running, which creates everything again.
    namespace = namespace or asyncio.run(namespace_of(Client(credentials)))
    goals = Goals(apiserver.own_namespace(namespace, credentials), beside=coexist, crds=crds, force=force)
    asyncio.run(run(credentials, goals, lambda line: print(line, flush=True)))


app = typer.Typer(
    no_args_is_help=True,
    help="Run the installation steps of the chart's Jobs.\n\nIt also lists images, and checks an installation.",
)

Manifests = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[MANIFEST]...", help="Output of helm template, or a ClusterPolicy. Default: standard input."
    ),
]
COLUMNS = (Column("NODE"), Column("GPUS"), Column("WORKLOAD"), Column("GETS", folds=True))


def _texts(manifests: list[Path] | None) -> list[tuple[str, str]]:
    return [(str(file), documents.text_of(file)) for file in manifests or ()] or [("stdin", sys.stdin.read())]


@app.command("crds")
def crds(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of their manifests, one in each file.")],
    *,
    only_missing: Annotated[
        bool, typer.Option("--only-missing", help="Create missing kinds, and leave existing kinds unchanged.")
    ] = False,
    namespace: apiserver.OwnNamespaceOption = "",
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Create or update gpuvirt's CustomResourceDefinitions.

    Definitions of other products stay unchanged. The command also deletes the Lease by which an uninstall keeps
    controllers from acting.
    """
    manifests = installing.read_kinds(folder)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    client, own, clock = Client(credentials), apiserver.own_namespace(namespace, credentials), RealClock()

    async def run() -> None:
        for line in await installing.install_kinds(client, manifests, clock, only_missing=only_missing):
            print(line)
        if (lifted := await installing.lift_hold(client, own, clock)) is not None:
            print(lifted)

    asyncio.run(run())


@app.command("namespace")
def namespace(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Namespace of the agents.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Permit privileged agents in a namespace.

    The command sets the namespace's label for pod security admission.
    """
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_namespace(client, name, RealClock())))


@app.command("policy")
def policy(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest of the ClusterPolicy.")],
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Create or update the cluster's ClusterPolicy.

    The command refuses to change the ClusterPolicy of another installation.
    """
    manifest = installing.read_policy(file)
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    print(asyncio.run(installing.install_policy(client, manifest, RealClock())))


@app.command("images")
def images(
    manifests: Manifests = None,
    *,
    systems: Annotated[
        list[str] | None,
        typer.Option(
            "--os",
            metavar="OS",
            help="Operating system of nodes with GPUs, for images of drivers: ubuntu22.04, rhel9; repeatable.",
        ),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="gpuvirt's image, if no manifest has the controller.")
    ] = f"gpuvirt:{__version__}",
) -> None:
    """List all images that an installation pulls, one a line.

    The list includes the images of the operands that the ClusterPolicy enables. `helm template` prints the manifests
    for your values.
    """
    for name in image_lists.images_of(_texts(manifests), image_lists.ImageInputs(frozenset(systems or ()), image)):
        print(name)


@app.command("check")
def check(
    manifests: Manifests = None,
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    selector: fleet.SelectorOption = "",
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """Preview the parts that each node would get from an installation.

    The command reads the nodes with your rights, and changes nothing. `helm template` prints the manifests for your
    values. The parts depend on the node's labels, and on plugins that already offer its GPUs.
    """
    policy, inputs = image_lists.operands_of(_texts(manifests), f"gpuvirt:{__version__}")
    client = Client(apiserver.demanded_credentials(kubeconfig, context))
    found = asyncio.run(preview(client, policy, inputs, selector))
    names = (f"node/{node.name}" for node in found.nodes)
    print_list(found, names, partial(_print_preview, found), ListFormat(output, no_headers))


def _print_preview(found: Preview, layout: Layout) -> None:
    out, table = console(), Table(COLUMNS, below="NOTE")
    for node in found.nodes:
        gpus = "yes" if node.has_gpus else "not known yet"
        cells = (node.name, gpus, node.workload, ", ".join(node.components) or NOTHING)
        table.add(*cells, below=filter(None, [node.note]))
    table.print(out, layout)
    for note in found.notes if layout.headings else ():
        say(out, note, style="yellow")


@app.command("verify")
def verify(
    *,
    timeout: Annotated[int, typer.Option("--timeout", min=1, metavar="SECONDS", help="Seconds to wait at most.")] = 240,
    namespace: apiserver.OwnNamespaceOption = "",
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
) -> None:
    """Check that an installation works; `helm test` runs this.

    The command checks that the API server serves gpuvirt's kinds, that a controller leads, and that all components of
    the ClusterPolicy are ready. It waits for the last two, and exits with 1 if one of them does not work.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    client, own = Client(credentials), apiserver.own_namespace(namespace, credentials)

    async def run() -> None:
        async for line in installing.verify(client, own, RealClock(), timeout):
            print(line, flush=True)

    asyncio.run(run())
