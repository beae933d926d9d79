"""What is invalid of the vGPUs that are wanted: configs, their files and names, and types that no card here carries."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gpuvirt.errors import ConfigError
from gpuvirt.model.desired.configchoice import ConfigGpu, GpuConfigs
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted, refused
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.vgpudefaults import DEFAULT, builtin_configs
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import profile_name


def unreadable(text: ConfigText, error: ConfigError) -> InvalidDesired:
    """Return that a text of configs can't be used."""
    return invalid(
        _source_of(text),
        error.message,
        "can't be used, so the previous vGPU configs stay in force",
        expected="vGPU configs in the grammar of NVIDIA's vgpu-device-manager",
        seen=Seen(text.where, str(error)),
        fix="correct it; it is read again when it changes",
    )


def no_key(text: ConfigText, keys: Sequence[str]) -> InvalidDesired:
    """Return that a ConfigMap lacks the key under which the configs stand."""
    found = ", ".join(map(quoted, keys)) or "no key"
    problem = f"is not there, so the previous vGPU configs stay in force: the ConfigMap has {found}"
    return invalid(_source_of(text), found, problem, expected="the key config.yaml")


def gone(text: ConfigText) -> InvalidDesired:
    """Return that the configs which were there have been taken away."""
    return invalid(
        _source_of(text),
        "nothing",
        "is no longer there, so the previous vGPU configs stay in force",
        expected="the previous configs",
        fix="create it again; to use none, remove the agent's file wishes.json and restart the agent",
    )


def missing_map(name: str) -> InvalidDesired:
    """Return that the ConfigMap which the settings name is not there, and never was."""
    return invalid(
        Source(Origin.SETTINGS, "settings $.vgpu_config_map"),
        name,
        f"names the ConfigMap {quoted(name)}, which is not there, so only the built-in configs exist",
        expected="a ConfigMap in the agent's namespace with the key config.yaml",
    )


def no_config(
    source: Source, name: str, configs: Iterable[str], text: ConfigText | None, gpus: Iterable[ConfigGpu]
) -> InvalidDesired:
    """Return that a name is that of no config; `configs` are those of the text, beside the built-in ones."""
    ours = "the built-in ones (gpuvirt vgpu default-config)"
    return invalid(
        source,
        name,
        f"is {quoted(name)}, which is the name of no vGPU config, so vGPUs stay as they are",
        expected="a vGPU config, or a vGPU type of this node's cards",
        known=_valid_names(configs, gpus) or builtin_configs(),
        seen=Seen("vGPU configs", f"those of {text.where}, and {ours}" if text is not None else ours),
    )


def for_no_gpu(
    source: Source, name: str, configs: Iterable[str], found: GpuConfigs, gpus: Iterable[ConfigGpu]
) -> InvalidDesired:
    """Return that a config has nothing for any GPU of the node."""
    return invalid(
        source,
        name,
        f"names the vGPU config {quoted(name)}, which is for no GPU of this node, so vGPUs stay as they are",
        expected="a config for these cards",
        known=[one for one in _valid_names(configs, gpus) if one != name],
        seen=Seen("", "; ".join(note.text for note in found.notes)) if found.notes else None,
        fix="gpuvirt vgpu types lists what the GPUs can carry",
    )


def without_vgpus(
    sources: Mapping[str, Source], config: str, desired: Collection[str], gpus: Iterable[ConfigGpu]
) -> tuple[InvalidDesired, ...]:
    """Return the GPUs that are named one by one for mode vgpu, and for which the config has nothing."""
    return tuple(
        invalid(
            sources[gpu.address],
            config,
            f"sets mode vgpu for {gpu.address}, and the vGPU config {quoted(config)} has nothing for that card, so the"
            " GPU stays as it is",
            expected="another GPU, or a config with vGPUs of its card",
            known=_types_of(gpu),
        )
        for gpu in gpus
        if gpu.address in sources and gpu.address not in desired
    )


def unknown_types(source: Source, gpu: ConfigGpu, config: str, refusals: Iterable[Reason]) -> Iterator[InvalidDesired]:
    """Yield the types of a config that a GPU's host does not know, by the refusals of the GPU's plan."""
    for reason in refusals:
        if reason.code is ReasonCode.NO_SUCH_TYPE:
            yield refused(source, config, f"a config of types that {gpu.address} carries", _types_of(gpu), reason)


def _source_of(text: ConfigText) -> Source:
    is_map = text.where.startswith("ConfigMap ")
    return Source(Origin.CONFIG_MAP if is_map else Origin.FILE, text.where)


def _valid_names(configs: Iterable[str], gpus: Iterable[ConfigGpu]) -> list[str]:
    """Return the configs that can be meant on a node: those of its ConfigMap or file, and its cards' types."""
    types = [one for gpu in gpus for one in _types_of(gpu)]
    return [*configs, *([DEFAULT, *dict.fromkeys(types)] if types else ())]


def _types_of(gpu: ConfigGpu) -> list[str]:
    """Return the vGPU types of a GPU's card: those of the catalog, else those that its host has named."""
    cards = catalog.cards_of(gpu.device, gpu.subsystem)
    return [one.profile.text for card in cards for one in card.types()] or sorted(map(profile_name, gpu.types))
