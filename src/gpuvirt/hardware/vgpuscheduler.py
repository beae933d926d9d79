"""The scheduler of a GPU's time-sliced vGPUs, read and set by nvidia-smi (`vgpu -ss`, `vgpu set-scheduler-state`).

What NVML says of it is documented (nvmlDeviceSetVgpuSchedulerState: policies 1 to 3; allowed while no machine runs;
lost with the driver), what the program calls its options is not, and releases differ. So the program's own help is read
first, and nothing is set where it does not name an option for what is wanted, or does not say the unit of a time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.nvidiasmi import parse_fields, section_of
from gpuvirt.hardware.tools import PROGRAM, ToolError, Tools

NUMBERS = {SchedulerPolicy.BEST_EFFORT: "1", SchedulerPolicy.EQUAL_SHARE: "2", SchedulerPolicy.FIXED_SHARE: "3"}
"""NVML_VGPU_SCHEDULER_POLICY_*"""
UNITS_PER_MS = {"ns": 1_000_000, "nanoseconds": 1_000_000, "us": 1000, "microseconds": 1000, "ms": 1, "milliseconds": 1}

_OPTION = re.compile(r"\s*\[?\s*(?P<short>-{1,2}[\w-]+)(?:\s*\|\s*(?P<long>-{1,2}[\w-]+))?\s*\]?\s*:?\s*(?P<text>.*)")
_UNIT = re.compile(rf"\b({'|'.join(UNITS_PER_MS)})\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?P<number>[0-9]+)(?:\s*(?P<unit>[a-z]+))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Options:
    """How this release's set-scheduler-state is told what is wanted."""

    policy: str
    time_slice: str | None = None
    units_per_ms: int = 1


def parse_state(text: str, gpu: PciAddress) -> Scheduler | Unread:
    """Return the scheduler in what `nvidia-smi vgpu -ss` writes of a GPU; Unread where it was not understood.

    A time slice is said for equal and fixed share alone; best effort has none that counts.
    """
    fields = {path[-1].lower().replace(" ", ""): value for path, value in parse_fields(section_of(text, gpu) or "")}
    names = {one.value.replace("-", ""): one for one in SchedulerPolicy}
    said = next((value for key, value in fields.items() if key.endswith("policy")), None)
    policy = names.get(re.sub(r"[\s_-]", "", said or "").lower())
    if policy is None:
        return Unread(PROGRAM, seen=f"vgpu -ss of {gpu}: policy: {said or 'no such line'}")
    if policy is SchedulerPolicy.BEST_EFFORT:
        return Scheduler(policy)
    key, slice_said = next(((one, value) for one, value in fields.items() if one.startswith("timeslice")), ("", ""))
    match, unit_in_key = _NUMBER.fullmatch(slice_said), re.search(r"\((\w+)\)", key)
    unit = (match["unit"] if match else None) or (unit_in_key[1] if unit_in_key else "")
    per_ms = UNITS_PER_MS.get(unit.lower())
    if match is None or per_ms is None:
        return Unread(PROGRAM, seen=f"vgpu -ss of {gpu}: {policy}, time slice {slice_said or 'not said'}")
    timeslice_ms = round(int(match["number"]) / per_ms)
    return Scheduler(policy, timeslice_ms or None)


def parse_help(text: str) -> Options:
    """Return the options in what `set-scheduler-state -h` writes; raise ToolError where none is for the policy."""
    options = dict(_options(text))
    policy = next((name for name in options if "policy" in name.lower()), None)
    time_slice = next((name for name in options if re.search(r"time-?_?slice|tslice", name.lower())), None)
    if policy is None:
        raise ToolError(f"nvidia-smi vgpu set-scheduler-state -h names no option for a policy: {text.strip()[:400]}")
    unit = _UNIT.search(options[time_slice]) if time_slice is not None else None
    if time_slice is None or unit is None:
        return Options(policy)
    return Options(policy, time_slice, UNITS_PER_MS[unit[1].lower()])


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Yield the long names of options, each with all that is said of it up to the next."""
    name, told = "", ""
    for line in text.splitlines():
        match = _OPTION.fullmatch(line)
        if match is None:
            told += f" {line.strip()}"
            continue
        if name:
            yield name, told
        name, told = match["long"] or match["short"], match["text"]
    if name:
        yield name, told


def read_scheduler(tools: Tools, gpu: PciAddress) -> Scheduler | Unread:
    """Return how a GPU's vGPUs share its time; raise ToolError."""
    return parse_state(tools.nvidia_smi("vgpu", "-ss", "-i", gpu), gpu)


def set_scheduler(tools: Tools, gpu: PciAddress, desired: Scheduler) -> None:
    """Let a GPU's vGPUs share its time in another way, at once and until the driver is loaded again.

    Raises ToolError (exit code 19: machines run), also where the GPU says otherwise afterwards.
    """
    options = parse_help(tools.nvidia_smi("vgpu", "set-scheduler-state", "-h"))
    arguments = [options.policy, NUMBERS[desired.policy]]
    if desired.timeslice_ms is not None:
        if options.time_slice is None:
            raise ToolError(
                "this nvidia-smi has no option for a time slice whose unit it tells; leave the time slice out"
            )
        arguments += [options.time_slice, str(desired.timeslice_ms * options.units_per_ms)]
    tools.nvidia_smi("vgpu", "set-scheduler-state", "-i", gpu, *arguments)
    found = read_scheduler(tools, gpu)
    if isinstance(found, Unread) or found.policy is not desired.policy:
        said = found.seen if isinstance(found, Unread) else found.policy
        raise ToolError(f"the scheduler of {gpu} was set to {desired.policy}, and nvidia-smi vgpu -ss says {said}")
    if desired.timeslice_ms not in {None, found.timeslice_ms}:
        raise ToolError(
            f"the time slice of {gpu} was set to {desired.timeslice_ms} ms, and nvidia-smi vgpu -ss says"
            f" {found.timeslice_ms} ms"
        )
