"""`gpuvirt discover`: labels a node by what its host shows, in clusters where nothing else does."""

import asyncio
import sys
from typing import Annotated

import typer

from gpuvirt.apps.discover import DiscoverOptions, Discovery, label_once
from gpuvirt.apps.logs import LogFormat, set_up
from gpuvirt.cli import apiserver, options
from gpuvirt.cli.addresses import ListenOption, address_of
from gpuvirt.clock import RealClock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware import discovery
from gpuvirt.hardware.kernel import Kernel, RealKernel
from gpuvirt.model.offers.discovery import labels_of
from gpuvirt.node.discoverer import unread_line
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
            "--once", help="Look once, print the labels, and write them where --node-name says on which node."
        ),
    ] = False,
    listen: ListenOption,
    log_format: options.LogFormatOption = LogFormat.TEXT,
) -> None:
    """Keep labels of this node that say whether it has NVIDIA GPUs, and which system it runs.

    It needs no rights on the host, and does not touch devices. It runs until SIGTERM or SIGINT.
    """
    kernel = RealKernel(HostRoots.under(host_root))
    node = apiserver.node_name_of(node_name)
    if once:
        _once(kernel, node, apiserver.credentials_of(kubeconfig, context) if node is not None else None)
        return
    if node is None:
        raise ConfigError("is missing: which node is to be labelled? --once looks without one", where="--node-name")

    set_up(log_format)
    found = _needed(apiserver.credentials_of(kubeconfig, context))
    discovery = Discovery(DiscoverOptions(kernel, found, node, address_of(listen)))
    asyncio.run(until_stopped(discovery.run()))


def _needed(found: Credentials | None) -> Credentials:
    if found is None:
        raise ConfigError(
            "no API server to ask: there is no service account's token here; expected one, or a kubeconfig",
            where="--kubeconfig",
        )
    return found


def _once(kernel: Kernel, node: NodeName | None, credentials: Credentials | None) -> None:
    """Print labels as `kubectl label node` takes them; end with 1 where something could not be told."""
    seen = discovery.look(kernel)
    labels = labels_of(seen, before=seen)  # who looks once has waited for what they wanted to wait for
    for label, value in labels.items():
        print(f"{label}={value}" if value is not None else f"{label}-")
    if node is not None:
        asyncio.run(label_once(Client(_needed(credentials)), node, labels, RealClock()))
    for one in seen.unread:
        print(f"gpuvirt: {unread_line(one)}", file=sys.stderr)
    if seen.unread:
        raise typer.Exit(1)
