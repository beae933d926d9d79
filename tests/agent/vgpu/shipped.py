"""The default config of NVIDIA's vgpu-device-manager: our facts, and NVIDIA's file if it lies beside the repository."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuvirt.model.desired import vgpuconfig
from gpuvirt.model.desired.vgpuconfig import ConfigEntry, parse_filter
from gpuvirt.model.vgputypes.profiles import parse_profile

HERE = Path(__file__).parent
FACTS = HERE / "vgpu-device-manager-0.5.0.txt"
FILES = sorted((HERE.parents[2] / "shared/data/vgpu-configs").glob("*.yaml"))

Configs = Mapping[str, tuple[ConfigEntry, ...]]


def sources() -> list[Path]:
    """Return the paths from which the configs can be read; at least one."""
    return [FACTS, *FILES]


def read(path: Path) -> Configs:
    """Return the configs of the facts or of a file, without their positions."""
    configs = dict(_facts(path)) if path == FACTS else vgpuconfig.parse(path.read_text(), where=path.name).configs
    return {name: tuple(_placeless(entry) for entry in entries) for name, entries in configs.items()}


def _placeless(entry: ConfigEntry) -> ConfigEntry:
    return ConfigEntry(entry.types, entry.indices, entry.filters, entry.scheduler, entry.sizes)


def _facts(path: Path) -> Iterator[tuple[str, tuple[ConfigEntry, ...]]]:
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    yield (
        "default",
        tuple(
            ConfigEntry({parse_profile(name): int(count)}, filters=frozenset({parse_filter(device)}))
            for _, device, name, count in (line for line in lines if line[0] == "default")
        ),
    )
    for gpu, *types in (line for line in lines if line[0] != "default"):
        for vgpu_type in types:
            rest, _, count = vgpu_type.partition(":")
            yield f"{gpu}-{rest}", (ConfigEntry({parse_profile(f"{gpu}-{rest}"): int(count)}),)
