"""What is added to the user's containers that request vGPUs: mounts, and the driver's folders in two variables.

A user's own value is kept: a folder is appended to it, and where that can't be done, the user gets a warning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from posixpath import normpath

import msgspec

from gpuvirt.cluster.admission.injectedparts import LIBRARIES, PROGRAMS, user_mounts
from gpuvirt.cluster.admission.injectionconfig import ClassSettings
from gpuvirt.cluster.admission.pod import EnvVar, Placed
from gpuvirt.cluster.jsonpatch import Op, Operation
from gpuvirt.cluster.kinds.podparts import EnvVar as NewEnvVar
from gpuvirt.cluster.kinds.podparts import VolumeMount
from gpuvirt.plain import Plain


@dataclass(frozen=True, slots=True)
class Change:
    """What is changed at a container."""

    operations: tuple[Operation, ...] = ()
    warnings: tuple[str, ...] = ()
    volumes: frozenset[str] = frozenset()
    """The names of the volumes that the container needs."""


def change(placed: Placed, settings: ClassSettings) -> Change:
    """Return what is changed at a container that requests a vGPU."""
    mounts, warnings = _mounts(placed, settings)
    variables, more = _variables(placed, settings)
    operations = (
        *append(placed.pointer("volumeMounts"), [plain(mount) for mount in mounts], placed.container.volume_mounts),
        *variables,
    )
    needed = frozenset(mount.name for mount in user_mounts(settings))
    return Change(operations, (*warnings, *more), needed)


def append(pointer: str, entries: list[Plain], existing: tuple[object, ...]) -> Iterator[Operation]:
    """Yield the operations that append entries to a list; one that is absent or null is created."""
    if not existing and entries:
        yield Operation(Op.ADD, pointer, entries)
    elif entries:
        yield from (Operation(Op.ADD, f"{pointer}/-", entry) for entry in entries)


def plain(part: msgspec.Struct) -> Plain:
    """Return a part of a pod as JSON has it."""
    content: Plain = msgspec.to_builtins(part)
    return content


def _mounts(placed: Placed, settings: ClassSettings) -> tuple[list[VolumeMount], list[str]]:
    """Return the mounts that a container lacks, and warnings of paths at which it has something else."""
    taken = {normpath(mount.mount_path): mount.name for mount in placed.container.volume_mounts}
    missing, warnings = list[VolumeMount](), list[str]()
    for mount in user_mounts(settings):
        found = taken.get(mount.mount_path)
        if found is None:
            missing.append(mount)
        elif found != mount.name:
            warnings.append(
                f"{placed.path}: volume {found} at {mount.mount_path} is kept; the vGPU needs volume {mount.name} there"
            )
    return missing, warnings


def _variables(placed: Placed, settings: ClassSettings) -> tuple[list[Operation], list[str]]:
    containers = settings.containers
    if not containers.driver:
        return [], []
    added, operations, warnings = list[Plain](), list[Operation](), list[str]()
    folders: list[tuple[str, str, str | None]] = [("PATH", PROGRAMS, containers.path)]
    if containers.library_path:
        folders.append(("LD_LIBRARY_PATH", LIBRARIES, None))
    env = placed.container.env
    for name, folder, default in folders:
        # Of several variables with one name, the last counts.
        index, found = next(((i, env[i]) for i in reversed(range(len(env))) if env[i].name == name), (0, None))
        if found is None:
            if default != "":
                value = f"{default}:{folder}" if default else folder
                added.append(plain(NewEnvVar(name=name, value=value)))
        elif found.value_from is not None:
            warnings.append(f"{placed.path}: {name} has valueFrom and is kept; the vGPU needs {folder} in it")
        elif folder not in found.value.split(":"):
            operations.append(_extended(placed, index, found, folder))
    operations += append(placed.pointer("env"), added, env)
    return operations, warnings


def _extended(placed: Placed, index: int, variable: EnvVar, folder: str) -> Operation:
    value = f"{variable.value}:{folder}" if variable.value else folder
    return Operation(Op.ADD, placed.pointer("env", str(index), "value"), value)
