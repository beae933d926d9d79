"""MIG mode of a GPU and its GPU instances, by nvidia-smi: what MIG-backed vGPUs are made on.

Only types whose GPU instance exists and is free are offered then; they are made by the back end of the host's framework
as all others. GPU instances are gone after a reset and a restart. Formats: NVIDIA's MIG user guide.
"""

import re

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.hardware.tools import PROGRAM, ToolError, Tools

NONE_FOUND = ("No GPU instances found", "No compute instances found", "No MIG-enabled devices found")
"""What is said where there is none; older releases say the first of compute instances, too."""
_ROW = re.compile(
    r"\|\s*[0-9]+\s+MIG\s+(?P<profile>\S+)\s+(?P<profile_id>[0-9]+)\s+(?P<id>[0-9]+)\s+(?P<start>[0-9]+):(?P<size>[0-9]+)\s*\|"
)
_CREATED = re.compile(r"Successfully created GPU instance ID\s+([0-9]+) on GPU\s")


def parse_instances(text: str) -> tuple[GpuInstance, ...] | Unread:
    """Return the rows of the table that `nvidia-smi mig -lgi` writes; Unread where one was not understood."""
    if any(none in text for none in NONE_FOUND):
        return ()
    rows = [line for line in text.splitlines() if re.match(r"\|\s*[0-9]", line)]
    matches = [_ROW.fullmatch(row.strip()) for row in rows]
    odd = next((row for row, match in zip(rows, matches, strict=True) if match is None), None if rows else text[:64])
    if odd is not None:
        return Unread(PROGRAM, seen=f"mig -lgi: {odd.strip()}")
    return tuple(
        GpuInstance(
            id=int(match["id"]),
            profile=match["profile"],
            profile_id=int(match["profile_id"]),
            start=int(match["start"]),
            size=int(match["size"]),
        )
        for match in matches
        if match is not None
    )


def read_instances(tools: Tools, gpu: PciAddress) -> tuple[GpuInstance, ...] | Unread:
    """Return the GPU instances of a GPU; raise ToolError."""
    try:
        return parse_instances(tools.nvidia_smi("mig", "-i", gpu, "-lgi"))
    except ToolError as error:
        if any(none in error.said for none in NONE_FOUND):
            return ()
        raise


def set_mode(tools: Tools, gpu: PciAddress, *, on: bool) -> None:
    """Switch MIG mode on or off; raise ToolError.

    It ends well, too, where the GPU must be reset first: `GpuModes.mig_pending` then differs from `mig`.
    """
    tools.nvidia_smi("-i", gpu, "-mig", "1" if on else "0")


def create_instance(tools: Tools, gpu: PciAddress, profile: str, start: int) -> int:
    """Make a GPU instance of a profile (`1g.10gb`) at a memory slice, and return its id; raise ToolError.

    Compute instances are the guest's to make. Without a place, the driver takes one that may be another's only one.
    """
    profile_at = f"{profile}:{start}"
    said = tools.nvidia_smi("mig", "-i", gpu, "-cgi", profile_at)
    match = _CREATED.search(said)
    if match is None:
        seen = said.strip()
        raise ToolError(f"nvidia-smi mig -i {gpu} -cgi {profile_at} does not say what it made: {seen}", said=said)
    return int(match[1])


def destroy_instance(tools: Tools, gpu: PciAddress, instance: int) -> None:
    """Take a GPU instance away, with the compute instances that somebody has made on it.

    Raises ToolError (exit code 19: a process or a vGPU has it).
    """
    try:
        tools.nvidia_smi("mig", "-i", gpu, "-dci", "-gi", str(instance))
    except ToolError as error:
        if not any(none in error.said for none in NONE_FOUND):
            raise
    tools.nvidia_smi("mig", "-i", gpu, "-dgi", "-gi", str(instance))
