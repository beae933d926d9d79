"""Reads and sets the scheduler of a GPU's time-sliced vGPUs (`nvidia-smi vgpu -ss`, `vgpu set-scheduler-state`).

NVML's function is documented (nvmlDeviceSetVgpuSchedulerState: policies 1 to 3; allowed while no VM runs; lost when
the driver is unloaded). The options of nvidia-smi are not, and differ between releases. So gpuvirt reads the program's
help first, and sets nothing where the help has no option for the setting, or no unit for a time.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import Scheduler, SchedulerPolicy
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.access.tools import PROGRAM, ToolError, Tools
from gpuvirt.hardware.programs.nvidiasmi import parse_fields, section_of

NUMBERS = {SchedulerPolicy.BEST_EFFORT: "1", SchedulerPolicy.EQUAL_SHARE: "2", SchedulerPolicy.FIXED_SHARE: "3"}
"""NVML_VGPU_SCHEDULER_POLICY_*"""
UNITS_PER_MS = {"ns": 1_000_000, "nanoseconds": 1_000_000, "us": 1000, "microseconds": 1000, "ms": 1, "milliseconds": 1}

_OPTION = re.compile(r"\s*\[?\s*(?P<short>-{1,2}[\w-]+)(?:\s*\|\s*(?P<long>-{1,2}[\w-]+))?\s*\]?\s*:?\s*(?P<text>.*)")
_UNIT = re.compile(rf"\b({'|'.join(UNITS_PER_MS)})\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?P<number>[0-9]+)(?:\s*(?P<unit>[a-z]+))?", re.IGNORECASE)


class Options(msgspec.Struct, frozen=True):
    """The options of this release's set-scheduler-state."""

    policy: str
    time_slice: str | None = None
    units_per_ms: int = 1


def parse_state(text: str, gpu: PciAddress) -> Scheduler | Unread:
    """Return a GPU's scheduler in the output of `nvidia-smi vgpu -ss`; Unread where it cannot be parsed.

    Only equal share and fixed share have a time slice; that of best effort is ignored.
    """
    fields = {path[-1].lower().replace(" ", ""): value for path, value in parse_fields(section_of(text, gpu) or "")}
    names = {policy.value.replace("-", ""): policy for policy in SchedulerPolicy}
    written = next((value for key, value in fields.items() if key.endswith("policy")), None)
    policy = names.get(re.sub(r"[\s_-]", "", written or "").lower())
    if policy is None:
        return Unread(PROGRAM, seen=f"vgpu -ss of {gpu}: policy: {written or 'no such line'}")
    if policy is SchedulerPolicy.BEST_EFFORT:
        return Scheduler(policy)
    key, time_slice = next(((key, value) for key, value in fields.items() if key.startswith("timeslice")), ("", ""))
    match, unit_in_key = _NUMBER.fullmatch(time_slice), re.search(r"\((\w+)\)", key)
    unit = (match["unit"] if match else None) or (unit_in_key[1] if unit_in_key else "")
    per_ms = UNITS_PER_MS.get(unit.lower())
    if match is None or per_ms is None:
        return Unread(PROGRAM, seen=f"vgpu -ss of {gpu}: {policy}, time slice {time_slice or 'not in the output'}")
    timeslice_ms = round(int(match["number"]) / per_ms)
    return Scheduler(policy, timeslice_ms or None)


def parse_help(text: str) -> Options:
    """Return the options in the output of `set-scheduler-state -h`; raise ToolError without one for the policy."""
    options = dict(_options(text))
    policy = next((name for name in options if "policy" in name.lower()), None)
    time_slice = next((name for name in options if re.search(r"time-?_?slice|tslice", name.lower())), None)
    if policy is None:
        raise ToolError(f"nvidia-smi vgpu set-scheduler-state -h lists no option for a policy: {text.strip()[:400]}")
    unit = _UNIT.search(options[time_slice]) if time_slice is not None else None
    if time_slice is None or unit is None:
        return Options(policy)
    return Options(policy, time_slice, UNITS_PER_MS[unit[1].lower()])


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Yield the long names of options, each with its description."""
    name, description = "", ""
    for line in text.splitlines():
        match = _OPTION.fullmatch(line)
        if match is None:
            description += f" {line.strip()}"
            continue
        if name:
            yield name, description
        name, description = match["long"] or match["short"], match["text"]
    if name:
        yield name, description


def read_scheduler(tools: Tools, gpu: PciAddress) -> Scheduler | Unread:
    """Return the scheduler of a GPU's vGPUs; raise ToolError."""
    return parse_state(tools.nvidia_smi("vgpu", "-ss", "-i", gpu), gpu)


def read_arguments(tools: Tools, desired: Scheduler) -> tuple[str, ...]:
    """Return the arguments of this release's set-scheduler-state for a scheduler.

    Raises ToolError where it has no option for a part of it.
    """
    options = parse_help(tools.nvidia_smi("vgpu", "set-scheduler-state", "-h"))
    arguments = [options.policy, NUMBERS[desired.policy]]
    if desired.timeslice_ms is not None:
        if options.time_slice is None:
            raise ToolError(
                "the help of this nvidia-smi has no option for a time slice with a unit; leave the time slice out"
            )
        arguments += [options.time_slice, str(desired.timeslice_ms * options.units_per_ms)]
    return tuple(arguments)


def set_scheduler(tools: Tools, gpu: PciAddress, desired: Scheduler, arguments: Sequence[str], proof: Proof) -> None:
    """Set the scheduler of a GPU's vGPUs by the arguments for it, at once and until the driver is loaded again.

    Raises ToolError (exit code 19: VMs run), also where the GPU has another scheduler afterwards.
    """
    proof.spend(gpu)
    tools.nvidia_smi("vgpu", "set-scheduler-state", "-i", gpu, *arguments)
    found = read_scheduler(tools, gpu)
    if isinstance(found, Unread) or found.policy is not desired.policy:
        shown = found.seen if isinstance(found, Unread) else found.policy
        raise ToolError(f"the scheduler of {gpu} was set to {desired.policy}, but nvidia-smi vgpu -ss shows {shown}")
    if desired.timeslice_ms not in {None, found.timeslice_ms}:
        raise ToolError(
            f"the time slice of {gpu} was set to {desired.timeslice_ms} ms, but nvidia-smi vgpu -ss shows"
            f" {found.timeslice_ms} ms"
        )
