"""`gpuvirt uninstall`: removes the controller's objects and labels from a cluster; the chart's Job runs it."""

import asyncio
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver
from gpuvirt.controller.install.uninstall import Goals, run


def uninstall(
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: apiserver.OwnNamespaceOption = "",
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
    own = apiserver.own_namespace(namespace, credentials)
    goals = Goals(own, beside=coexist, crds=crds, force=force)
    asyncio.run(run(credentials, goals, lambda line: print(line, flush=True)))
