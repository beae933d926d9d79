"""`gpuvirt plan node/NAME`: what a workload or a vGPU config would change on a node; it writes nothing."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console

from gpuvirt.cli.formats import Output
from gpuvirt.cli.output.render import print_document
from gpuvirt.cli.output.tables import NOTHING, Column, Table, console, say
from gpuvirt.cli.parameters import apiserver, completion, options
from gpuvirt.cli.parameters.fleet import read_gpu_node
from gpuvirt.cli.parameters.vgpuconfigs import ConfigFile, read_configs
from gpuvirt.diagnosis.target import NODE_KINDS, node_target
from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import NodeName
from gpuvirt.kube.kinds.gpunode import GpuNode, Spec
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet
from gpuvirt.model.desired.gpumodes import FOR_CONTAINERS, DesiredMode
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.desired.vgpuconfig import DEFAULT
from gpuvirt.model.desired.workload import MODES, Workload
from gpuvirt.model.reasons import count_of
from gpuvirt.plans.nodeplan import WHOLE, GpuPlan, NodePlan, plan_node

COLUMNS = (Column("GPU"), Column("MODE", folds=True), Column("NOW", folds=True), Column("THEN"), Column("FREE"))
ON_A_HOST = "on a host itself: gpuvirt vgpu apply --dry-run, gpuvirt vfio bind --dry-run"

NodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="node/NAME",
        autocompletion=completion.node_targets,
        help="A node of the cluster: node/NAME, or node NAME.",
    ),
]


def plan(  # noqa: PLR0913  one parameter an option
    target: NodeArgument,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The node's name, after `node`.", show_default=False)
    ] = None,
    *,
    vgpu_config: Annotated[
        str | None,
        typer.Option(
            "--vgpu-config",
            metavar="NAME",
            autocompletion=completion.configs,
            help="The vGPU config that a label would name: A10-4Q, default.",
        ),
    ] = None,
    workload: Annotated[
        Workload | None,
        typer.Option("--workload", help="The workload that a label would name. With --vgpu-config alone: vm-vgpu."),
    ] = None,
    config_file: ConfigFile = None,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    output: options.OutputFormat = Output.TABLE,
) -> None:
    """Preview the changes that a label would make on a node.

    The command reads the node's GpuNode, and plans with the same code as the node's agent. It shows the vGPUs that each
    GPU would carry, the users that block the change, and how many VMs of each type would then fit. It also names the
    facts that only the node can show. It changes nothing.

    It exits with 0 if the agent could make all changes at once, with 1 otherwise.
    """
    node = _node(target, name)
    if vgpu_config is None and workload is None:
        raise ConfigError("expected --workload, --vgpu-config, or both", where="plan")
    if vgpu_config is not None and workload not in {None, Workload.VGPU}:
        raise ConfigError(f"is for --workload {Workload.VGPU}, found {workload}", where="--vgpu-config")
    gpu_node = read_gpu_node(apiserver.demanded_credentials(kubeconfig, context), node)
    mode = MODES[workload or Workload.VGPU]
    config = _config(gpu_node, vgpu_config) if mode is DesiredMode.VGPU else None
    configs, notes = read_configs(config_file)
    found = plan_node(gpu_node, mode, config, ConfigSet(configs, notes) if config_file is not None else ConfigSet())
    if not print_document(found, output):
        show(found)
    raise typer.Exit(1 if found.is_refused else 0)


def _node(target: str, name: str | None) -> NodeName:
    is_kind = name is not None and target.casefold() in NODE_KINDS
    try:
        node = node_target(f"node/{name}" if is_kind else target)
    except ValueError as error:
        raise ConfigError(str(error), where="plan") from error
    if node is None or (name is not None and not is_kind):
        raise ConfigError(f"expected node/NAME, found {target!r}; {ON_A_HOST}", where="plan")
    return node


def _config(gpu_node: GpuNode, name: str | None) -> ConfigName:
    """Return the config that a label would name; without a new label, that of the node's spec."""
    if name is not None:
        return ConfigName(name, Source(Origin.LABEL, "--vgpu-config"))
    spec = gpu_node.spec or Spec()
    return ConfigName(spec.vgpu_config or DEFAULT, Source(Origin.GPU_NODE, "GpuNode $.spec.vgpuConfig"))


def show(found: NodePlan) -> None:
    """Print the plan: a row for each GPU, what prevents it, and how many VMs then fit."""
    out = console()
    config = f" with the vGPU config {found.vgpu_config}" if found.vgpu_config else ""
    preview = f"preview of node {found.node} in mode {found.mode}{config}; this command writes nothing"
    say(out, preview, style="bold")
    if found.problem is not None:
        say(out, found.problem, style="yellow")
    out.print()
    table = Table(COLUMNS)
    for gpu in found.gpus:
        mode = gpu.mode if gpu.mode == gpu.desired_mode else f"{gpu.mode} -> {gpu.desired_mode}"
        free = "unknown" if gpu.fits is None else "by type" if gpu.one_of and gpu.fits else _counts(gpu.fits)
        table.add(gpu.address, mode, _counts(gpu.vgpus), _then(gpu), free, below=_below(gpu))
    if found.gpus:
        table.print(out)
    for text in found.unknown:
        say(out, text, style="yellow")
    if not found.gpus and found.unknown:
        return
    out.print()
    for text in dict.fromkeys(text for gpu in found.gpus for text in gpu.unknown):
        say(out, text, head="not known here: ")
    if found.mode in FOR_CONTAINERS and not any(gpu.fits for gpu in found.gpus):
        say(out, "The GPUs are for containers; no VM gets one.")
    else:
        _print_fits(out, found)


def _print_fits(out: Console, found: NodePlan) -> None:
    total, one_of = Counter[str](), Counter[str]()
    for gpu in found.gpus:
        if gpu.one_of:
            one_of += Counter(gpu.fits or {})
        else:
            total += Counter(gpu.fits or {})
    parts = [_vms(total)] if total or not one_of else []
    either = " or ".join(f"{count} with {name}" for name, count in _largest_last(one_of))
    parts += [f"{either} (the first vGPU of a GPU decides its type)"] if one_of else []
    say(out, f"VMs that then fit: {', '.join(parts)}", style="green" if total or one_of else "yellow")


def _then(gpu: GpuPlan) -> str:
    if gpu.desired_mode == DesiredMode.SHARED and not gpu.vgpus_then:
        return "units" if gpu.units is None else count_of(gpu.units, "unit")
    return "unknown" if gpu.vgpus_then is None else _counts(gpu.vgpus_then)


def _below(gpu: GpuPlan) -> list[str]:
    lines = [f"in the way: {', '.join(gpu.in_the_way)}"] if gpu.in_the_way else []
    if gpu.one_of and gpu.fits:
        lines.append(f"free: {' or '.join(f'{count} x {name}' for name, count in _largest_last(gpu.fits))}")
    lines += gpu.reasons
    if not (gpu.changes or gpu.in_the_way or gpu.reasons):
        lines.append("nothing changes" if gpu.mode == gpu.desired_mode else "its driver and its vGPUs stay as they are")
    return lines


def _largest_last(fits: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the types and their counts, the smallest type first, of which most fit."""
    return sorted(fits.items(), key=lambda fit: (-fit[1], fit[0]))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or NOTHING


def _vms(total: Counter[str]) -> str:
    whole = [f"{total[WHOLE]} with a whole GPU"] if total[WHOLE] else []
    return (
        ", ".join([*whole, *(f"{count} with {name}" for name, count in sorted(total.items()) if name != WHOLE)])
        or "none"
    )
