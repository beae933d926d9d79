"""`nvidia-vgpu-dm`, by the name and with the options of NVIDIA's program: vGPUs of a host by hand or from a script.

It does what `gpuvirt vgpu apply` and `assert` do. Where the original removes all vGPUs of a GPU to change one, and may
end half the way, this one changes what differs, leaves what is in use, and puts back what was there. `assert` asks of
the GPUs that the config is for, and not of all that the host has.
"""

from typing import Annotated

import typer

from gpuvirt.apps import logs
from gpuvirt.cli import options, vgpuapply
from gpuvirt.cli.options import Output
from gpuvirt.cli.version import Version
from gpuvirt.cli.vgpuoptions import NeededConfigFile, Selected, ValidConfig

app = typer.Typer(
    name="nvidia-vgpu-dm",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Apply vGPU configs to the GPUs of this host, and see whether they are applied.",
)


@app.callback()
def root(
    *,
    debug: Annotated[bool, typer.Option("--debug", "-d", envvar="VGPU_DM_DEBUG", help="Say more.")] = False,
    version: Version = False,  # noqa: ARG001
) -> None:
    """Apply vGPU configs, and see whether they are applied."""
    if debug:
        logs.set_up(logs.LogFormat.TEXT, verbose=True)


@app.command("apply")
def apply(
    config_file: NeededConfigFile,
    selected: Selected = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
) -> None:
    """Have the GPUs of this host carry what a config wants of them."""
    where = vgpuapply.Where(host_root, kubelet_dir, Output.TABLE, assume_unallocated)
    vgpuapply.apply(where, config_file, selected, rebind=False, dry_run=False)


@app.command("assert")
def assert_(
    config_file: NeededConfigFile,
    selected: Selected = None,
    *,
    valid_config: ValidConfig = False,
    host_root: options.HostRoot = options.ROOT,
) -> None:
    """End with 0 if the GPUs that a config is for carry what it wants, with 1 if not."""
    vgpuapply.check(vgpuapply.Where(host_root, None, Output.TABLE), config_file, selected, valid_only=valid_config)
