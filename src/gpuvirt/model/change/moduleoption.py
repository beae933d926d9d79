"""The modprobe file that sets the vGPU schedulers of GPUs at each load of NVIDIA's driver: its text, and conflicts.

Format: kernel-open/nvidia/nv-reg.h, NVreg_RegistryDwordsPerDevice="pci=DDDD:BB:DD.F;KEY=VALUE;...;pci=...". The driver
reads the parameter when it is loaded, so a change of the file takes effect at the next boot.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from gpuvirt.errors import DamagedError, InvalidIdError
from gpuvirt.facts.ids import PciAddress, parse_pci_address
from gpuvirt.facts.pci import Unread
from gpuvirt.facts.platform import Attribute
from gpuvirt.model.reasons import Reason, ReasonCode, Seen, refusals
from gpuvirt.paths import HostPath

FILE = HostPath("/etc/modprobe.d/gpuvirt-vgpu-scheduler.conf")
PARAMETER = "NVreg_RegistryDwordsPerDevice"
KEY = "RmPVMRL"
HEAD = "# Kept by gpuvirt: the vGPU schedulers of GPUs. The driver reads this when it is loaded."

_OURS = re.compile(rf'options nvidia {PARAMETER}="(?P<value>[^"\\]*)"')
_PAIR = re.compile(r"[A-Za-z0-9_]+=0x[0-9a-fA-F]{1,8}")


def merge(existing: str | None, gpu: PciAddress, value: int | None) -> str | None:
    """Return the text of gpuvirt's file with a GPU's RmPVMRL set or removed; None if the file would be empty.

    Raises DamagedError if the file does not have gpuvirt's form, since another program or a user has then written it.
    """
    entries = {address: dict(pairs) for address, pairs in _parse(existing or "")}
    keys = entries.setdefault(gpu, {})
    if value is None:
        keys.pop(KEY, None)
    else:
        keys[KEY] = f"0x{value:08x}" if value > 0xFF else f"0x{value:02x}"
    option = ";".join(_option_of(address, pairs) for address, pairs in sorted(entries.items()) if pairs)
    return f'{HEAD}\noptions nvidia {PARAMETER}="{option}"\n' if option else None


def kept(existing: str) -> Mapping[PciAddress, int]:
    """Return the values of RmPVMRL in gpuvirt's file; raise DamagedError if it does not have gpuvirt's form."""
    return {address: int(value, 16) for address, pairs in _parse(existing) for key, value in pairs if key == KEY}


def _option_of(address: PciAddress, pairs: Mapping[str, str]) -> str:
    return ";".join([f"pci={address}", *(f"{key}={value}" for key, value in pairs.items())])


def _parse(text: str) -> Iterator[tuple[PciAddress, list[tuple[str, str]]]]:
    """Yield the keys and values of each GPU, in the file's order."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return
    match = _OURS.fullmatch(lines[0].strip())
    if match is None or len(lines) > 1:
        raise _damaged(lines[-1] if match else lines[0])
    current: tuple[PciAddress, list[tuple[str, str]]] | None = None
    for word in filter(None, match["value"].split(";")):
        key, _, value = word.strip().partition("=")
        if key == "pci":
            if current is not None:
                yield current
            current = _address(value), []
        elif current is None or not _PAIR.fullmatch(word.strip()):
            raise _damaged(word)
        else:
            current[1].append((key, value))
    if current is not None:
        yield current


def _address(text: str) -> PciAddress:
    try:
        return parse_pci_address(text)
    except InvalidIdError as error:
        raise DamagedError(f"{FILE}: {error}; delete the file, and set the schedulers again") from error


def _damaged(found: str) -> DamagedError:
    return DamagedError(
        f'{FILE}: expected one line, options nvidia {PARAMETER}="pci=ADDRESS;{KEY}=VALUE;..."; found {found.strip()!r};'
        " move the other options into another file, or delete this one, and set the schedulers again"
    )


def conflicting_options(files: Iterable[Attribute], gpu: PciAddress) -> tuple[Reason, ...]:
    """Return the options of other files that conflict with gpuvirt's: the kernel takes one value of the parameter.

    `files` are those of modprobe's folders. A file that can't be read may have the parameter, so it is a conflict too.
    """
    return tuple(_obstacles(files, gpu))


def _obstacles(files: Iterable[Attribute], gpu: PciAddress) -> Iterator[Reason]:
    for file in files:
        if file.path == FILE:
            continue
        if isinstance(file.value, Unread):
            yield refusals.unread(gpu, file.value)
        for line in (file.text or "").replace("\\\n", " ").splitlines():
            words = line.split(None, 2)
            if words[:2] == ["options", "nvidia"] and PARAMETER in words[-1]:
                yield Reason(
                    ReasonCode.OPTION_ELSEWHERE,
                    gpu,
                    f"loses its scheduler at the next load of the driver: {PARAMETER} is set in another file too, and"
                    " the driver accepts one value",
                    (Seen(file.path, line.strip()[:200]),),
                    f"write it there: pci={gpu};{KEY}=VALUE; or move that line's GPUs to {FILE}",
                )
