"""`nvidia-vgpu-dm`, with the name and options of NVIDIA's program, for a shell or a script.

It does the same as `gpuvirt vgpu apply` and `assert`. The original removes all vGPUs of a GPU to change one, and may
stop halfway; this program changes only vGPUs that differ, leaves those in use, and rolls a failed change back. `assert`
checks the GPUs that the config names, where the original checks all GPUs of the host.
"""

from typing import Annotated

import typer

from gpuvirt import logs
from gpuvirt.cli.changes import vgpuchanges
from gpuvirt.cli.formats import Output
from gpuvirt.cli.parameters import options
from gpuvirt.cli.parameters.vgpuconfigs import NeededConfigFile, Selected, ValidConfig
from gpuvirt.cli.version import Version

app = typer.Typer(
    name="nvidia-vgpu-dm",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Apply vGPU configs to the GPUs of this host, and check whether they are applied.",
)


@app.callback()
def root(
    *,
    debug: Annotated[bool, typer.Option("--debug", "-d", envvar="VGPU_DM_DEBUG", help="Log more.")] = False,
    version: Version = False,  # noqa: ARG001
) -> None:
    """Apply vGPU configs, and check whether they are applied."""
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
    """Apply a vGPU config to the GPUs of this host."""
    where = vgpuchanges.AppliedHost(host_root, kubelet_dir, Output.TABLE, assume_unallocated)
    vgpuchanges.apply(where, config_file, selected, rebind=False, dry_run=False)


@app.command("assert")
def assert_(
    config_file: NeededConfigFile,
    selected: Selected = None,
    *,
    valid_config: ValidConfig = False,
    host_root: options.HostRoot = options.ROOT,
) -> None:
    """Check whether GPUs carry the vGPUs of a vGPU config.

    The exit code is 0 if they do, 1 if not.
    """
    vgpuchanges.check(
        vgpuchanges.AppliedHost(host_root, None, Output.TABLE), config_file, selected, valid_only=valid_config
    )
