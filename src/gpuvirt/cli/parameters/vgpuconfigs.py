"""The vGPU configs on a command line: the options that name a file and a config, and the config that is selected.

The options of NVIDIA's program have the same names.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from gpuvirt.cli.parameters import completion
from gpuvirt.errors import ConfigError
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, Note, builtin_configs
from gpuvirt.model.inventory.nearness import correction


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
        autocompletion=completion.configs,
        help="Name of the config: default, A10-4Q, ... Not needed if the file has only one.",
    ),
]
ValidConfig = Annotated[
    bool,
    typer.Option(
        "--valid-config", "-a", envvar="VGPU_DM_VALID_CONFIG", help="Only check that the file contains the config."
    ),
]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="The PCI address of a GPU: 0000:65:00.0")]


STDIN = "-"


def read_configs(file: str | None) -> tuple[Mapping[str, tuple[ConfigEntry, ...]], tuple[Note, ...]]:
    """Return the configs of a file, `-` for standard input, or the built-in configs; raise ConfigError."""
    if file is None:
        return builtin_configs(), ()
    from_stdin = file == STDIN
    found = vgpuconfig.parse(sys.stdin.read(), where="standard input") if from_stdin else vgpuconfig.load(Path(file))
    return found.configs, found.notes


def select(configs: Mapping[str, tuple[ConfigEntry, ...]], name: str | None) -> str:
    """Return the name of the selected config, or of the only one if none is selected; raise ConfigError."""
    if name is None:
        if len(configs) != 1:
            raise ConfigError(f"there are {len(configs)} configs; name one", where="--selected-config")
        return next(iter(configs))
    if name not in configs:
        hint = correction(name, configs) or f"there are {', '.join(list(configs)[:8]) or 'none'}"
        raise ConfigError(f"there is no config {name!r}; {hint}", where="--selected-config")
    return name
