"""The gates of a host in their two folders, both of which each change passes.

Agents and commands have theirs below `/run`. An unprivileged device plugin (`--plugin-only`) can't write there: of its
pod's two mounts, only the kubelet's device-plugins folder keeps files. So it has its gates in a subfolder of that one,
since a starting kubelet deletes the files of its folder and leaves subfolders alone. An allocation passes the gate of
the agent that makes it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import msgspec

from gpuvirt.agent.change.gate.gate import PATIENCE_S, Gate, Pass, gate_at
from gpuvirt.agent.change.gate.gatelock import Anchor, GateFailedError, UnitBusyError
from gpuvirt.agent.change.gate.unsettled import Read, no_readings
from gpuvirt.hardware.access.attributes import ABSENT
from gpuvirt.model.inventory.isolation import Slots

PLUGIN_FOLDER = "gpuvirt"
"""The folder of an unprivileged plugin's files, in the kubelet's device-plugins folder."""
PRIVATE = 0o700
"""The mode of that folder: any process that can open a file could lock it, and so keep changes away."""


def plugin_gates(device_plugins: Path) -> Path:
    """Return the folder of the gates of an unprivileged device plugin."""
    return device_plugins / PLUGIN_FOLDER / "gate"


class Gates(msgspec.Struct, frozen=True):
    """The gates of a host, as a process passes them that changes GPUs."""

    host: Gate
    """The gates of agents and commands."""
    device_plugins: Path
    """The kubelet's device-plugins folder. Without it no device plugin can offer anything."""
    anchor: Anchor
    """The file by which changes exclude each other even where the files of the gates are deleted."""

    @property
    def all(self) -> tuple[Gate, ...]:
        """The gates in both folders, in the order in which each change takes their locks; raise GateFailedError."""
        return (self.host, self.plugin) if self.may_have_plugins else (self.host,)

    @property
    def may_have_plugins(self) -> bool:
        """Whether the kubelet's folder exists, or may exist."""
        try:
            self.device_plugins.stat()
        except OSError as error:
            return error.errno not in ABSENT  # unknown: the gates in it are used, or raise
        return True

    @property
    def plugin(self) -> Gate:
        """The gates of an unprivileged device plugin, where the kubelet's folder exists; raise GateFailedError."""
        folder = plugin_gates(self.device_plugins)
        for path in (folder.parent, folder):
            try:
                path.mkdir(exist_ok=True, mode=PRIVATE)
            except OSError as error:
                raise GateFailedError(path, error) from error
        return gate_at(folder)

    @contextmanager
    def change(self, unit: str, members: Callable[[], Slots], readings: Read = no_readings) -> Iterator[Pass]:
        """Keep all other processes of the host from changing or allocating a unit's devices; raise UnitBusyError."""
        host, *others = self.all
        with host.change(unit, members, readings, beside=others, anchor=self.anchor) as passed:
            yield passed

    def drain(
        self,
        unit: str,
        slots: Slots,
        intent: str,
        *,
        desires: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Stop all allocations from these slots, until `stop_draining` or the next change; raise UnitBusyError."""
        try:
            for gate in self.all:
                gate.drain(unit, slots, intent, desires=desires, patience_s=patience_s)
        except UnitBusyError:
            self.stop_draining(slots)
            raise

    def stop_draining(self, slots: Iterable[str] | None = None) -> None:
        """Allow allocations from those of these slots that this process drains, from all of them without `slots`."""
        for gate in (self.host, gate_at(plugin_gates(self.device_plugins))):
            gate.stop_draining(tuple(gate.draining) if slots is None else tuple(slots))
