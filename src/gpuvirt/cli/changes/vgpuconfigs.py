"""The options --config-file and --selected-config of commands that apply vGPU configs."""

import sys
from collections.abc import Mapping
from pathlib import Path

from gpuvirt.errors import ConfigError
from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpudefaults import builtin_configs
from gpuvirt.model.desired.vgpuentries import Entry, Note
from gpuvirt.model.inventory.nearness import nearest

STDIN = "-"


def read_configs(file: str | None) -> tuple[Mapping[str, tuple[Entry, ...]], tuple[Note, ...]]:
    """Return the configs of a file, `-` for standard input, or the built-in configs; raise ConfigError."""
    if file is None:
        return builtin_configs(), ()
    from_stdin = file == STDIN
    found = vgpuconfig.parse(sys.stdin.read(), where="standard input") if from_stdin else vgpuconfig.load(Path(file))
    return found.configs, found.notes


def select(configs: Mapping[str, tuple[Entry, ...]], name: str | None) -> str:
    """Return the name of the selected config, or of the only one if none is selected; raise ConfigError."""
    if name is None:
        if len(configs) != 1:
            raise ConfigError(f"there are {len(configs)} configs; name one", where="--selected-config")
        return next(iter(configs))
    if name not in configs:
        meant = nearest(name, configs)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(list(configs)[:8]) or 'none'}"
        raise ConfigError(f"there is no config {name!r}; {hint}", where="--selected-config")
    return name
