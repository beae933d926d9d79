"""Reads and changes the MIG mode and the GPU instances of a GPU with nvidia-smi.

A MIG-backed vGPU needs a free GPU instance. In MIG mode, the driver offers only types whose GPU instance exists and is
free; the back end of the host's framework creates these vGPUs as all others. A reset or a reboot removes all GPU
instances. Formats: NVIDIA's MIG user guide.
"""

import re

from gpuvirt.facts.ids import PciAddress
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuInstance
from gpuvirt.hardware.access.proof import Proof
from gpuvirt.hardware.access.tools import PROGRAM, ToolError, Tools

NONE_FOUND = ("No GPU instances found", "No compute instances found", "No MIG-enabled devices found")
"""The messages of nvidia-smi for an empty list; older releases use the first also for compute instances."""
_ROW = re.compile(
    r"\|\s*[0-9]+\s+MIG\s+(?P<profile>\S+)\s+(?P<profile_id>[0-9]+)\s+(?P<id>[0-9]+)\s+(?P<start>[0-9]+):(?P<size>[0-9]+)\s*\|"
)
_CREATED = re.compile(r"Successfully created GPU instance ID\s+([0-9]+) on GPU\s")


def parse_instances(text: str) -> tuple[GpuInstance, ...] | Unread:
    """Return the rows of the table that `nvidia-smi mig -lgi` writes; Unread where a row cannot be parsed."""
    if any(none in text for none in NONE_FOUND):
        return ()
    rows = [line for line in text.splitlines() if re.match(r"\|\s*[0-9]", line)]
    matches = [_ROW.fullmatch(row.strip()) for row in rows]
    invalid = next(
        (row for row, match in zip(rows, matches, strict=True) if match is None), None if rows else text[:64]
    )
    if invalid is not None:
        return Unread(PROGRAM, seen=f"mig -lgi: {invalid.strip()}")
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
        if any(none in error.output for none in NONE_FOUND):
            return ()
        raise


def set_mode(tools: Tools, gpu: PciAddress, proof: Proof, *, on: bool) -> None:
    """Switch MIG mode on or off; raise ToolError.

    It also succeeds where the GPU must be reset first: `GpuModes.mig_pending` then differs from `mig`.
    """
    proof.spend(gpu)
    tools.nvidia_smi("-i", gpu, "-mig", "1" if on else "0")


def create_instance(tools: Tools, gpu: PciAddress, profile: str, start: int) -> int:
    """Create a GPU instance of a profile (`1g.10gb`) at a memory slice, and return its id; raise ToolError.

    The guest creates the compute instances. Without a slice, the driver would choose one that may be the only possible
    slice of another instance.
    """
    profile_at = f"{profile}:{start}"
    output = tools.nvidia_smi("mig", "-i", gpu, "-cgi", profile_at)
    match = _CREATED.search(output)
    if match is None:
        command = f"nvidia-smi mig -i {gpu} -cgi {profile_at}"
        raise ToolError(f"{command} does not report the created GPU instance: {output.strip()}", output=output)
    return int(match[1])


def destroy_instance(tools: Tools, gpu: PciAddress, instance: int, proof: Proof) -> None:
    """Remove a GPU instance and its compute instances.

    Raises ToolError (exit code 19: a process or a vGPU uses the instance).
    """
    proof.spend(gpu)
    try:
        tools.nvidia_smi("mig", "-i", gpu, "-dci", "-gi", str(instance))
    except ToolError as error:
        if not any(none in error.output for none in NONE_FOUND):
            raise
    tools.nvidia_smi("mig", "-i", gpu, "-dgi", "-gi", str(instance))
