"""The command line of the simulated nvidia-smi: its options, and a parser."""

from collections.abc import Mapping, Sequence

import msgspec

from gpuvirt.errors import GpuvirtError

Verb = tuple[str, ...]
"""The words before the options: `("vgpu", "set-scheduler-state")`; empty for nvidia-smi itself."""

SCHEDULER: Verb = ("vgpu", "set-scheduler-state")


class _Option(msgspec.Struct, frozen=True):
    short: str
    long: str
    about: str
    takes_value: bool = False


_HELP = _Option("-h", "--help", "Display help information")
_ID = _Option("-i", "--id", "Enumeration index, PCI bus ID or UUID; several with commas", takes_value=True)

OPTIONS: Mapping[Verb, tuple[_Option, ...]] = {
    (): (
        _HELP,
        _ID,
        _Option("-L", "--list-gpus", "List the GPUs"),
        _Option("-q", "--query", "Show the modes of each GPU"),
        _Option("-mig", "--multi-instance-gpu", "MIG mode: 1 - Enabled, 0 - Disabled", takes_value=True),
    ),
    ("mig",): (
        _HELP,
        _ID,
        _Option("-lgip", "--list-gpu-instance-profiles", "List the profiles of GPU instances"),
        _Option("-lgi", "--list-gpu-instances", "List the GPU instances"),
        _Option("-lci", "--list-compute-instances", "List the compute instances"),
        _Option("-cgi", "--create-gpu-instance", "Create GPU instances of these profiles", takes_value=True),
        _Option("-C", "--default-compute-instance", "With -cgi: create a compute instance on each"),
        _Option("-dci", "--destroy-compute-instance", "Destroy compute instances"),
        _Option("-dgi", "--destroy-gpu-instance", "Destroy GPU instances"),
        _Option("-gi", "--gpu-instance-id", "With -dci and -dgi: of these GPU instances", takes_value=True),
    ),
    ("vgpu",): (
        _HELP,
        _ID,
        _Option("-s", "--supported", "List the vGPU types that each GPU supports"),
        _Option("-c", "--creatable", "List the vGPU types that can be created now"),
        _Option("-v", "--verbose", "With -s and -c: show what each type is"),
        _Option("-ss", "--scheduler-state", "Show the vGPU scheduler"),
        _Option("-shm", "--set-heterogeneous-mode", "Mixed-size mode: 1 - Enabled, 0 - Disabled", takes_value=True),
    ),
    SCHEDULER: (
        _HELP,
        _ID,
        _Option(
            "-p",
            "--policy",
            "Scheduler policy\n                     1 - Best Effort, 2 - Equal Share, 3 - Fixed Share",
            takes_value=True,
        ),
        _Option("-t", "--time-slice", "Time slice in nanoseconds", takes_value=True),
    ),
}


class UsageError(GpuvirtError):
    """A command line that the simulated nvidia-smi does not accept."""


class Command(msgspec.Struct, frozen=True):
    """A parsed command line."""

    verb: Verb
    options: Mapping[str, str]
    """The values by the options' short names, empty for options without a value."""


def parse(arguments: Sequence[str]) -> Command:
    """Parse a command line; raise UsageError. An option's value follows it, or a `=`."""
    words = list(arguments)
    verb: Verb = ()
    while words and (*verb, words[0]) in OPTIONS:
        verb = (*verb, words.pop(0))
    known = {name: option for option in OPTIONS[verb] for name in (option.short, option.long)}
    found: dict[str, str] = {}
    while words:
        name, equals, value = words.pop(0).partition("=")
        option = known.get(name)
        if option is None or (equals and not option.takes_value):
            raise UsageError(f"unknown option or command: {name}\n{usage(verb)}")
        if option.takes_value and not equals:
            if not words:
                raise UsageError(f"{name} needs a value\n{usage(verb)}")
            value = words.pop(0)
        found[option.short] = value
    return Command(verb, found)


def usage(verb: Verb) -> str:
    """Return the help of a command."""
    line = " ".join(("nvidia-smi", *verb))
    title = f"    {verb[-1]} -- Set the vGPU scheduler state." if verb == SCHEDULER else f"    {line}, simulated."
    options = [f"    [{option.short} | {option.long}]: {option.about}" for option in OPTIONS[verb]]
    below = [
        " ".join(("nvidia-smi", *other)) for other in OPTIONS if len(other) == len(verb) + 1 and other[:-1] == verb
    ]
    more = ["", f"    See also: {', '.join(f'{name} -h' for name in below)}"] if below else []
    return "\n".join(["", title, "", f"    Usage: {line} [options]", "", "    Options include:", *options, *more, ""])
