"""`gpuvirt completion` and what shells complete: vGPU configs and types, and the nodes of the kubeconfig's cluster.

A completion that fails prints nothing: the shell would show an error in the middle of the typed line.
"""

import asyncio
import io
import os
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli.parameters import apiserver
from gpuvirt.errors import GpuvirtError

MOST_S = 1.5
"""The longest time for which a shell waits for the API server."""


class Shell(StrEnum):
    """A shell that completes words."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"


def completion(ctx: typer.Context, shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the script that completes words in a shell.

    For this session: source <(gpuvirt completion bash). For all sessions, write the script to a file that the shell
    reads at its start.
    """
    os.environ["_GPUVIRT_COMPLETE"] = f"source_{shell}"  # noqa: TID251  by which click asks for the script
    with redirect_stdout(io.StringIO()) as script, suppress(SystemExit):
        ctx.find_root().command.main([], prog_name="gpuvirt")
    print(script.getvalue().strip())  # zsh reads the first line


def configs(incomplete: str) -> list[str]:
    """Return the names of the built-in vGPU configs: `default`, and each vGPU type."""
    from gpuvirt.model.desired.vgpuconfig import builtin_configs

    return starting(incomplete, builtin_configs())


def types(incomplete: str) -> list[str]:
    """Return the vGPU types of all cards."""
    from gpuvirt.model.vgputypes.catalog import cards

    return starting(incomplete, dict.fromkeys(vgpu_type.profile.text for card in cards() for vgpu_type in card.types()))


def nodes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the nodes with a GpuNode, by the kubeconfig of the typed options."""
    return starting(incomplete, _gpu_nodes(ctx))


def node_targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return `node/NAME` for each node with a GpuNode."""
    if not "node/".startswith(incomplete[:5]):
        return []
    return starting(incomplete, (f"node/{name}" for name in _gpu_nodes(ctx)))


def _gpu_nodes(ctx: typer.Context) -> tuple[str, ...]:
    kubeconfig, context = ctx.params.get("kubeconfig"), ctx.params.get("context")
    try:
        return asyncio.run(_read(Path(kubeconfig) if kubeconfig else None, str(context or "")))
    except (GpuvirtError, ExceptionGroup, OSError):
        return ()


async def _read(kubeconfig: Path | None, context: str) -> tuple[str, ...]:
    from gpuvirt.kube.client import Client
    from gpuvirt.kube.kinds.core import AnyObject
    from gpuvirt.kube.kinds.gpunode import GPU_NODES
    from gpuvirt.kube.resources import Collection

    client = Client(apiserver.asked_credentials(kubeconfig, context))
    async with asyncio.timeout(MOST_S):
        return tuple(gpu_node.metadata.name for gpu_node in (await client.list(Collection(GPU_NODES, AnyObject))).items)


def starting(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with what was typed."""
    return sorted(name for name in names if name.startswith(incomplete))
