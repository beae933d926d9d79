"""`gpuvirt vgpu`: the vGPUs of a node by hand."""

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Which vGPUs are wanted on a node's GPUs, and what configs say of that.",
)


@app.callback()
def vgpu() -> None:
    """Keep `gpuvirt vgpu` a group of commands, however few it has."""


@app.command("default-config")
def default_config(
    *,
    name: Annotated[
        str | None, typer.Option("--name", metavar="CONFIG", help="Print this one alone: default, A10-4Q, ...")
    ] = None,
) -> None:
    """Print the built-in vGPU configs, one for each vGPU type and `default`, as a file to begin one's own with.

    The file has nothing that NVIDIA's vgpu-device-manager doesn't take.
    """
    from gpuvirt.errors import ConfigError
    from gpuvirt.model import vgpuconfig
    from gpuvirt.model.nearness import nearest
    from gpuvirt.model.vgpudefaults import builtin_configs

    configs = builtin_configs()
    if name is not None and name not in configs:
        meant = nearest(name, configs)
        hint = f"; did you mean {meant}?" if meant else "; `gpuvirt vgpu default-config` prints them all"
        raise ConfigError(f"there is no built-in config {name}{hint}", where="--name")
    print(vgpuconfig.written({one: configs[one] for one in ([name] if name is not None else configs)}), end="")
