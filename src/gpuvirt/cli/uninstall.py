"""`gpuvirt uninstall`: takes from a cluster what the controller has put there; the chart's Job runs it."""

import asyncio
from typing import Annotated

import typer

from gpuvirt.cli import apiserver
from gpuvirt.install.uninstall import Goals, run


def uninstall(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.HomeOption = "",
    coexist: Annotated[
        bool,
        typer.Option("--coexist", envvar="GPUVIRT_COEXIST", help="Leave the labels of NVIDIA's operator, which stays."),
    ] = False,
    crds: Annotated[
        bool,
        typer.Option("--crds", help="Delete the kinds, too, with all their objects; those of other products stay."),
    ] = False,
) -> None:
    """Take away what gpuvirt has put into the cluster. Devices stay as they are, and so does what machines have.

    Operands and the discoverer go, labels, entries in KubeVirt's configuration, GpuNodes, and the ClusterPolicy of an
    install. Each is said, and so is what stays, with why. It may be run again at any time, and goes on where it was.
    """
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    home = apiserver.home_of(namespace, credentials)
    asyncio.run(run(credentials, Goals(home, beside=coexist, crds=crds), lambda line: print(line, flush=True)))
