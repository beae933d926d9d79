"""`gpuvirt vgpu`: lists, creates and deletes vGPUs, and applies vGPU configs."""

from functools import partial
from typing import Annotated

import typer

from gpuvirt.agent.change.observation import observe
from gpuvirt.cli.changes import vgpuapply, vgpuhost, vgpuscheduler
from gpuvirt.cli.formats import ListFormat, ListOutput, Output
from gpuvirt.cli.output import fleetrender, render, vgpurender
from gpuvirt.cli.parameters import apiserver, completion, fleet, options
from gpuvirt.cli.parameters.vgpuconfigs import Address, ConfigFile, Selected, ValidConfig
from gpuvirt.errors import ConfigError
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpudefaults import builtin_configs
from gpuvirt.model.inventory.nearness import nearest

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create and delete vGPUs, and apply vGPU configs.\n\nNo command removes a vGPU that is in use.",
)
app.add_typer(vgpuscheduler.app, name="scheduler")

Rebind = Annotated[
    bool, typer.Option("--rebind", help="First bind GPUs that are on a VFIO driver to their original drivers.")
]


@app.command("apply")
def apply(  # noqa: PLR0913  a command's options
    *,
    config_file: ConfigFile = None,
    selected: Selected = None,
    rebind: Rebind = False,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Apply a vGPU config to the GPUs that it names.

    The command creates the config's vGPUs, and removes unused vGPUs that the config does not include. It never removes
    a vGPU that is in use.
    """
    where = vgpuapply.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuapply.apply(where, config_file, selected, rebind=rebind, dry_run=dry_run)


@app.command("assert")
def assert_(
    *,
    config_file: ConfigFile = None,
    selected: Selected = None,
    valid_config: ValidConfig = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Check whether GPUs carry the vGPUs of a vGPU config.

    The command exits with 0 if they do. Otherwise it prints the missing steps and the reasons, and exits with 1.
    """
    where = vgpuapply.AppliedHost(host_root, kubelet_dir, output)
    vgpuapply.check(where, config_file, selected, valid_only=valid_config)


@app.command("list")
def list_(  # noqa: PLR0913  a command's options
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
    node: fleet.NodeOption = None,
    all_nodes: fleet.AllNodesOption = False,
    kubeconfig: fleet.ClusterFile = None,
    context: apiserver.ContextOption = "",
) -> None:
    """List the vGPUs of this host or cluster, and their users."""
    if (gpu_nodes := fleet.asked_nodes(node, kubeconfig, context, every=all_nodes)) is not None:
        found = fleetrender.vgpus_of(gpu_nodes)
        ids = (row.id for row in found)
        render.print_list(found, ids, partial(fleetrender.vgpus, found), ListFormat(output, no_headers))
        return
    here = vgpuhost.host(host_root, kubelet_dir)
    rows = vgpurender.rows_of(vgpuhost.gpu_states(observe(here.change_host, here.inputs, None)))
    ids = (row.id for row in rows)
    render.print_list(rows, ids, partial(vgpurender.vgpus, rows), ListFormat(output, no_headers))


@app.command("types")
def types(
    addresses: options.GpuAddresses = None,
    *,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    output: options.ListFormat = ListOutput.TABLE,
    no_headers: options.NoHeaders = False,
) -> None:
    """List each GPU's vGPU types, and how many vGPUs fit."""
    here = vgpuhost.host(host_root, kubelet_dir)
    seen = observe(here.change_host, here.inputs, None)
    chosen = vgpuhost.gpus_named(seen, addresses or sorted(seen.inventory.gpus))
    rows = vgpurender.types_of(
        {gpu: gpu_state for gpu, gpu_state in vgpuhost.gpu_states(seen).items() if gpu in chosen}
    )
    names = (row.name for row in rows)
    render.print_list(rows, names, partial(vgpurender.types, rows), ListFormat(output, no_headers))


@app.command("create")
def create(  # noqa: PLR0913  a command's options
    address: Address,
    vgpu_type: Annotated[
        str,
        typer.Argument(metavar="TYPE", autocompletion=completion.types, help="A vGPU type: A10-4Q, or NVIDIA A10-4Q."),
    ],
    *,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of vGPUs.")] = 1,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Create vGPUs on a GPU, in addition to its existing ones."""
    where = vgpuapply.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuapply.create(where, address, vgpu_type, count, dry_run=dry_run)


@app.command("delete")
def delete(
    vgpus: Annotated[list[str], typer.Argument(metavar="VGPU...", help="Ids of vGPUs (gpuvirt vgpu list).")],
    *,
    dry_run: options.DryRun = False,
    host_root: options.HostRoot = options.ROOT,
    kubelet_dir: options.KubeletDirOfHost = None,
    assume_unallocated: options.AssumeUnallocated = False,
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Remove vGPUs that are not in use.

    For a vGPU that is in use, the command prints the user, and exits with 1.
    """
    where = vgpuapply.AppliedHost(host_root, kubelet_dir, output, assume_unallocated)
    vgpuapply.delete(where, vgpus, dry_run=dry_run)


@app.command("default-config")
def default_config(
    *,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="CONFIG",
            autocompletion=completion.configs,
            help="Print only this config: default, A10-4Q, ...",
        ),
    ] = None,
) -> None:
    """Print the built-in vGPU configs as a config file.

    There is one config for each vGPU type, and `default`. NVIDIA's vgpu-device-manager accepts the file, too.
    """
    configs = builtin_configs()
    if name is not None and name not in configs:
        meant = nearest(name, configs)
        hint = f"; did you mean {meant}?" if meant else "; `gpuvirt vgpu default-config` prints them all"
        raise ConfigError(f"there is no built-in config {name}{hint}", where="--name")
    print(vgpuconfig.written(configs if name is None else {name: configs[name]}), end="")
