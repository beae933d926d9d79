"""Options of the commands that apply vGPU configs; those of NVIDIA's program have the same names."""

from typing import Annotated

import typer
from typer.models import OptionInfo


def _config_file(more: str = "") -> OptionInfo:
    about = f"File of vGPU configs; - for standard input.{more}"
    option: OptionInfo = typer.Option("--config-file", "-f", envvar="VGPU_DM_CONFIG_FILE", metavar="FILE", help=about)
    return option


NeededConfigFile = Annotated[str, _config_file()]
ConfigFile = Annotated[str | None, _config_file(" Default: the built-in configs.")]
Selected = Annotated[
    str | None,
    typer.Option(
        "--selected-config",
        "-c",
        envvar="VGPU_DM_SELECTED_CONFIG",
        metavar="NAME",
        help="Name of the config: default, A10-4Q, ... Not needed if the file has only one.",
    ),
]
ValidConfig = Annotated[
    bool,
    typer.Option(
        "--valid-config", "-a", envvar="VGPU_DM_VALID_CONFIG", help="Only check that the file has that config."
    ),
]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="The PCI address of a GPU: 0000:65:00.0")]
