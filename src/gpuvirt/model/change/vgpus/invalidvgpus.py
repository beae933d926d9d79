"""Invalid desired vGPUs: vGPU configs, their files and names, and types that none of the node's cards carries."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gpuvirt.errors import ConfigError
from gpuvirt.model.desired.configchoice import ConfigGpu, GpuConfigs
from gpuvirt.model.desired.invalid import InvalidDesired, Origin, Source, invalid, quoted, refused
from gpuvirt.model.desired.observed import ConfigText
from gpuvirt.model.desired.vgpuconfig import DEFAULT, builtin_configs
from gpuvirt.model.reasons import Reason, ReasonCode, Seen
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.profiles import profile_name


def unreadable(text: ConfigText, error: ConfigError) -> InvalidDesired:
    """Report a text of vGPU configs that can't be used."""
    return invalid(
        _source_of(text),
        error.message,
        "can't be used, so the previous vGPU configs stay in force",
        expected="vGPU configs in the grammar of NVIDIA's vgpu-device-manager",
        seen=Seen(text.where, str(error)),
        fix="correct it; it is read again when it changes",
    )


def no_key(text: ConfigText, keys: Sequence[str]) -> InvalidDesired:
    """Report a ConfigMap without the key that has the configs."""
    found = ", ".join(map(quoted, keys)) or "no key"
    problem = f"does not exist, so the previous vGPU configs stay in force: the ConfigMap has {found}"
    return invalid(_source_of(text), found, problem, expected="the key config.yaml")


def gone(text: ConfigText) -> InvalidDesired:
    """Report vGPU configs that have been deleted."""
    return invalid(
        _source_of(text),
        "nothing",
        "no longer exists, so the previous vGPU configs stay in force",
        expected="the previous configs",
        fix="create it again; to use none, remove the agent's file desired.json and restart the agent",
    )


def missing_map(name: str) -> InvalidDesired:
    """Report that the ConfigMap which the settings name has never existed."""
    return invalid(
        Source(Origin.SETTINGS, "settings $.vgpu_config_map"),
        name,
        f"names the ConfigMap {quoted(name)}, which does not exist, so only the built-in configs can be used",
        expected="a ConfigMap in the agent's namespace with the key config.yaml",
    )


def no_config(
    source: Source, name: str, configs: Iterable[str], text: ConfigText | None, gpus: Iterable[ConfigGpu]
) -> InvalidDesired:
    """Report a name that no config has; `configs` are those of the text, beside the built-in ones."""
    ours = "the built-in ones (gpuvirt vgpu default-config)"
    return invalid(
        source,
        name,
        f"is {quoted(name)}, but no vGPU config has this name, so vGPUs stay as they are",
        expected="a vGPU config, or a vGPU type of this node's cards",
        known=_valid_names(configs, gpus) or builtin_configs(),
        seen=Seen("vGPU configs", f"those of {text.where}, and {ours}" if text is not None else ours),
    )


def for_no_gpu(
    source: Source, name: str, configs: Iterable[str], found: GpuConfigs, gpus: Iterable[ConfigGpu]
) -> InvalidDesired:
    """Report a config whose entries select none of the node's GPUs."""
    return invalid(
        source,
        name,
        f"names the vGPU config {quoted(name)}, which selects no GPU of this node, so vGPUs stay as they are",
        expected="a config for these cards",
        known=[valid for valid in _valid_names(configs, gpus) if valid != name],
        seen=Seen("", "; ".join(note.text for note in found.notes)) if found.notes else None,
        fix="gpuvirt vgpu types lists the vGPU types of the GPUs",
    )


def without_vgpus(
    sources: Mapping[str, Source], config: str, desired: Collection[str], gpus: Iterable[ConfigGpu]
) -> tuple[InvalidDesired, ...]:
    """Report the GPUs that are set to mode vgpu by their address, but that the config does not select."""
    return tuple(
        invalid(
            sources[gpu.address],
            config,
            f"sets mode vgpu for {gpu.address}, but the vGPU config {quoted(config)} does not select that card, so the"
            " GPU stays as it is",
            expected="another GPU, or a config with vGPUs of its card",
            known=_types_of(gpu),
        )
        for gpu in gpus
        if gpu.address in sources and gpu.address not in desired
    )


def unknown_types(source: Source, gpu: ConfigGpu, config: str, refusals: Iterable[Reason]) -> Iterator[InvalidDesired]:
    """Yield the types of a config that the host does not have for a GPU, by the refusals of the GPU's plan."""
    for reason in refusals:
        if reason.code is ReasonCode.NO_SUCH_TYPE:
            yield refused(source, config, f"a config of types that {gpu.address} carries", _types_of(gpu), reason)


def _source_of(text: ConfigText) -> Source:
    is_map = text.where.startswith("ConfigMap ")
    return Source(Origin.CONFIG_MAP if is_map else Origin.FILE, text.where)


def _valid_names(configs: Iterable[str], gpus: Iterable[ConfigGpu]) -> list[str]:
    """Return the names of a node's configs: those of its ConfigMap or file, and its cards' types."""
    types = [name for gpu in gpus for name in _types_of(gpu)]
    return [*configs, *([DEFAULT, *dict.fromkeys(types)] if types else ())]


def _types_of(gpu: ConfigGpu) -> list[str]:
    """Return the vGPU types of a GPU's card: those of the catalog, else those that the host has named."""
    cards = catalog.cards_of(gpu.device, gpu.subsystem)
    return [card_type.profile.text for card in cards for card_type in card.types()] or sorted(
        map(profile_name, gpu.types)
    )
