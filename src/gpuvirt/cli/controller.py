"""`gpuvirt controller`: what all nodes are for, and what is to run where for that."""

import asyncio
import os
from typing import Annotated

import typer

from gpuvirt.apps.controller import ControllerOptions, run_until_stopped
from gpuvirt.apps.logs import LogFormat, set_up
from gpuvirt.cli import apiserver, options
from gpuvirt.cli.addresses import address_of
from gpuvirt.cluster.operator.decisions import Home


def controller(  # noqa: PLR0913  one parameter an option
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.HomeOption = "",
    leader_elect: Annotated[
        bool, typer.Option(help="Lead only while no other process does, by the Lease gpuvirt-controller.")
    ] = True,
    coexist: Annotated[
        bool,
        typer.Option(
            "--coexist",
            envvar="GPUVIRT_COEXIST",
            help="Run beside NVIDIA's GPU operator: nodes labelled for virtual machines are ours, the others its.",
        ),
    ] = False,
    kubevirt: Annotated[
        bool,
        typer.Option(envvar="GPUVIRT_KUBEVIRT", help="Write what KubeVirt lacks to permit devices; else say it alone."),
    ] = True,
    image: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_IMAGE",
            metavar="IMAGE",
            help="gpuvirt's own image, which node agents run; without it nothing is deployed.",
        ),
    ] = "",
    image_pull_policy: Annotated[
        str, typer.Option(envvar="GPUVIRT_IMAGE_PULL_POLICY", metavar="POLICY", help="When that image is pulled.")
    ] = "IfNotPresent",
    image_pull_secret: Annotated[
        list[str] | None,
        typer.Option(envvar="GPUVIRT_IMAGE_PULL_SECRETS", metavar="NAME", help="A Secret for pulling it."),
    ] = None,
    listen: Annotated[
        str, typer.Option(envvar="GPUVIRT_LISTEN", metavar="ADDRESS:PORT", help="Where to serve metrics and probes.")
    ] = ":8080",
    log_format: options.LogFormatOption = LogFormat.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Run the controller: it keeps nodes, GpuNodes and operands as the ClusterPolicy and the nodes' labels say.

    It runs until SIGTERM or SIGINT. Nothing on any device changes by its start, its end or its absence: agents keep on
    doing what they were last told.
    """
    set_up(log_format, verbose=verbose)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    served = ControllerOptions(
        credentials=credentials,
        home=Home(
            namespace=apiserver.home_of(namespace, credentials),
            coexists=coexist,
            manages_kubevirt=kubevirt,
            image=image or None,
            pull_policy=image_pull_policy,
            pull_secrets=tuple(image_pull_secret or ()),
            images={name: value for name, value in os.environ.items() if name.endswith("_IMAGE")},  # noqa: TID251
        ),
        elects=leader_elect,
        listen=address_of(listen),
    )
    asyncio.run(run_until_stopped(served))
