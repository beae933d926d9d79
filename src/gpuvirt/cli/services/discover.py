"""`gpuvirt discover`: labels a node that has NVIDIA GPUs, for clusters without node-feature-discovery."""

import asyncio
import sys
from typing import Annotated

import typer

from gpuvirt.agent.discoverprocess import DiscoverOptions, DiscoverProcess, label_once, unread_line
from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import ListenOption, address_of
from gpuvirt.clock import RealClock
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware import discovery
from gpuvirt.hardware.access.kernel import Kernel, RealKernel
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.offers.discovery import labels_of
from gpuvirt.paths import HostRoots
from gpuvirt.tasks import until_stopped


def discover(  # noqa: PLR0913  one parameter an option
    *,
    host_root: options.HostRoot = options.ROOT,
    node_name: apiserver.NodeNameOption = None,
    kubeconfig: apiserver.KubeConfigOption = None,
    context: apiserver.ContextOption = "",
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Observe the host once, print the labels, and with --node-name set them on that node."
        ),
    ] = False,
    listen: ListenOption,
    log_format: options.LogFormatOption = LogFormat.TEXT,
) -> None:
    """Label this node with its NVIDIA GPUs and operating system.

    The command needs no rights on the host and opens no device. It runs until SIGTERM or SIGINT.
    """
    kernel = RealKernel(HostRoots.under(host_root))
    node = apiserver.node_name_of(node_name)
    if once:
        _once(kernel, node, apiserver.credentials_of(kubeconfig, context) if node is not None else None)
        return
    if node is None:
        raise ConfigError("is missing: expected the node to label; --once works without a node", where="--node-name")

    set_up(log_format)
    credentials = apiserver.needed_credentials(apiserver.credentials_of(kubeconfig, context))
    discovery = DiscoverProcess(DiscoverOptions(kernel, credentials, node, address_of(listen)))
    asyncio.run(until_stopped(discovery.run()))


def _once(kernel: Kernel, node: NodeName | None, credentials: Credentials | None) -> None:
    """Print labels as arguments of `kubectl label node`; exit with 1 if a file could not be read."""
    seen = discovery.discover(kernel)
    labels = labels_of(seen, before=seen)  # a single observation counts as confirmed
    for label, value in labels.items():
        print(f"{label}={value}" if value is not None else f"{label}-")
    if node is not None:
        client = Client(apiserver.needed_credentials(credentials))
        asyncio.run(label_once(client, node, labels, RealClock()))
    for unread in seen.unread:
        print(f"gpuvirt: {unread_line(unread)}", file=sys.stderr)
    if seen.unread:
        raise typer.Exit(1)
