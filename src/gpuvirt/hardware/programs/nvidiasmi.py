"""Asks nvidia-smi for facts of a GPU that only it reports, and changes its MIG mode, GPU instances and mixed sizes.

The modes and the supported vGPU types come from output for people: `nvidia-smi -q` (the headings MIG Mode, vGPU Device
Capability and GPU Virtualization Mode, as in published output of 535 to 580) and `nvidia-smi vgpu -s -v` (vGPU user
guide, 6.2.9). A value that cannot be parsed is Unread, with the program's path.

A MIG-backed vGPU needs a free GPU instance. In MIG mode, the driver offers only types whose GPU instance exists and is
free; the back end of the host's framework creates these vGPUs as all others. A reset or a reboot removes all GPU
instances. Formats: NVIDIA's MIG user guide.
"""

import re
from collections.abc import Iterator, Mapping

from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.vgpu import GpuInstance, GpuModes, SupportedType
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


def set_mig_mode(tools: Tools, gpu: PciAddress, proof: Proof, *, on: bool) -> None:
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


YES, NO = frozenset({"Enabled", "Supported"}), frozenset({"Disabled", "Not Supported"})
NOT_APPLICABLE = "N/A"

_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s:][^:]*?)\s*(?::\s*(?P<value>.*?))?\s*")
_HEAD = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7])\s*")
_MIB = re.compile(r"([0-9]+) MiB")

Path = tuple[str, ...]
"""A field with the headings above it: `("MIG Mode", "Current")`."""


def section_of(text: str, gpu: PciAddress) -> str | None:
    """Return the section of a GPU, None where there is none; the PCI domain in its heading may have eight digits."""
    found: list[str] | None = None
    for line in text.splitlines():
        if match := _HEAD.fullmatch(line):
            if found is not None:
                break
            found = [] if is_same(match[1], gpu) else None
        elif found is not None:
            found.append(line)
    return None if found is None else "\n".join(found)


def is_same(written: str, gpu: PciAddress) -> bool:
    """Return whether an address as nvidia-smi writes it (`00000000:65:00.0`) is that of a GPU."""
    domain, _, rest = written.lower().partition(":")
    ours, _, ours_rest = gpu.partition(":")
    return rest == ours_rest and int(domain, 16) == int(ours, 16)


def parse_fields(text: str) -> Iterator[tuple[Path, str]]:
    """Yield the fields of indented output, in order; a line without a value is a heading of the lines below it."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        indent = len(match["indent"])
        above = [heading for heading in above if heading[0] < indent]
        if match["value"] is not None:
            yield (*(key for _, key in above), match["key"]), match["value"]
        above.append((indent, match["key"]))


def parse_modes(text: str, gpu: PciAddress) -> GpuModes:
    """Return the modes in the output of `nvidia-smi -q`, which does not list GPU instances."""
    section = section_of(text, gpu)
    if section is None:
        missing = Unread(PROGRAM, seen=f"no GPU {gpu} in -q")
        return GpuModes(gpu, missing, missing, missing, missing, missing)
    fields = dict(parse_fields(section))
    return GpuModes(
        gpu,
        mixed_sizes=_switch(fields, "GPU Virtualization Mode", "vGPU Heterogeneous Mode"),
        can_mix_sizes=_switch(fields, "vGPU Device Capability", "Heterogeneous Time-Slice Sizes"),
        mig=_switch(fields, "MIG Mode", "Current"),
        mig_pending=_switch(fields, "MIG Mode", "Pending"),
    )


def _switch(fields: Mapping[Path, str], heading: str, key: str) -> bool | Unread | None:
    """Return the value of a field; also None where an older driver has the heading without the field."""
    value = fields.get((heading, key))
    if value in YES or value in NO:
        return value in YES
    if value == NOT_APPLICABLE or (value is None and any(path[0] == heading for path in fields)):
        return None
    return Unread(PROGRAM, seen=f"-q: {heading} / {key}: {'no such line' if value is None else value}")


def read_modes(tools: Tools, gpu: PciAddress) -> GpuModes:
    """Return the modes of a GPU, and its GPU instances where it is in MIG mode; raise ToolError."""
    modes = parse_modes(tools.nvidia_smi("-q", "-i", gpu), gpu)
    if modes.mig is not True:
        return modes
    return GpuModes(
        gpu, modes.mixed_sizes, modes.can_mix_sizes, modes.mig, modes.mig_pending, read_instances(tools, gpu)
    )


def set_mixed_sizes(tools: Tools, gpu: PciAddress, proof: Proof, *, on: bool) -> None:
    """Switch mixed sizes on or off; raise ToolError.

    Exit code 19: the GPU has vGPUs, 6: no such GPU. Set it after VFs are switched on and before a vGPU is created.
    """
    proof.spend(gpu)
    tools.nvidia_smi("vgpu", "-i", gpu, "-shm", "1" if on else "0")


def parse_supported(text: str, gpu: PciAddress) -> tuple[SupportedType, ...] | Unread:
    """Return a GPU's types in the output of `nvidia-smi vgpu -s -v`; Unread where one of them cannot be parsed."""
    section = section_of(text, gpu)
    if section is None:
        return Unread(PROGRAM, seen=f"no GPU {gpu} in vgpu -s -v")
    blocks: list[dict[str, str]] = []
    for path, value in parse_fields(section):
        if path == ("vGPU Type ID",):
            blocks.append({})
        if blocks:
            blocks[-1][path[-1]] = value
    found: list[SupportedType] = []
    for block in blocks:
        try:
            found.append(_supported(block))
        except (KeyError, ValueError):
            return Unread(PROGRAM, seen=f"vgpu -s -v: type {block.get('vGPU Type ID')} {block.get('Name')}")
    return tuple(found)


def _supported(block: Mapping[str, str]) -> SupportedType:
    """Return one type; raise KeyError where a field is missing, ValueError where it is invalid."""
    profile, size = block["GPU Instance Profile ID"], _MIB.fullmatch(block["FB Memory"])
    if size is None:
        raise ValueError(block["FB Memory"])
    return SupportedType(
        id=int(block["vGPU Type ID"], 0),
        name=VgpuType(block["Name"]),
        framebuffer_mib=int(size[1]),
        most=int(block["Max Instances"]),
        profile_id=None if profile == NOT_APPLICABLE else int(profile, 0),
    )


def read_supported(tools: Tools, gpu: PciAddress) -> tuple[SupportedType, ...] | Unread:
    """Return the vGPU types that a GPU supports; raise ToolError."""
    return parse_supported(tools.nvidia_smi("vgpu", "-i", gpu, "-s", "-v"), gpu)
