"""Options of commands that apply vGPU configs: ours, and those of NVIDIA's program, which have the same names."""

from typing import Annotated

import typer
from typer.models import OptionInfo


def _config_file(more: str = "") -> OptionInfo:
    about = f"vGPU configs; - for standard input.{more}"
    option: OptionInfo = typer.Option("--config-file", "-f", envvar="VGPU_DM_CONFIG_FILE", metavar="FILE", help=about)
    return option


NeededConfigFile = Annotated[str, _config_file()]
ConfigFile = Annotated[str | None, _config_file(" Without it, the built-in ones.")]
Selected = Annotated[
    str | None,
    typer.Option(
        "--selected-config",
        "-c",
        envvar="VGPU_DM_SELECTED_CONFIG",
        metavar="NAME",
        help="Which of them: default, A10-4Q, ...; the only one where the file has just one.",
    ),
]
ValidConfig = Annotated[
    bool,
    typer.Option("--valid-config", "-a", envvar="VGPU_DM_VALID_CONFIG", help="Only see that the file has that config."),
]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="The PCI address of a GPU: 0000:65:00.0")]
