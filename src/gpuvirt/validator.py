"""Checks a node for containers until the check passes, and writes a marker file for the operands that wait for it.

The file is written when its check passes, and removed as soon as a check fails.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.kinds.core import Node
from gpuvirt.cluster.labels import GPU_RESOURCES
from gpuvirt.cluster.resources import NODES
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.containerdriver import DriverRoots, NotReadyError, check_toolkit, find_driver
from gpuvirt.hardware.tools import Run, is_there, run_program
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.change.unused import why_not_unused
from gpuvirt.model.reasons import in_words
from gpuvirt.node.store.files import replace_file

log = logging.getLogger(__name__)

DRIVER, TOOLKIT, PLUGIN = (f"{name}-ready" for name in ("driver", "toolkit", "plugin"))
EVERY_S = 5.0

Check = Callable[[], Awaitable[str]]
"""Returns the content of the marker file; raises GpuvirtError where the check fails."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A file that exists while a check passes."""

    path: Path

    @property
    def is_there(self) -> bool:
        """Whether the file exists."""
        return self.path.exists()

    def write(self, content: str) -> None:
        """Create or replace the file."""
        replace_file(self.path, content.encode(), durable=False, mode=0o644)
        log.info("%s written", self.path)

    def remove(self) -> None:
        """Remove the file where it exists."""
        self.path.unlink(missing_ok=True)


def driver_check(roots: DriverRoots, run: Run = run_program) -> Check:
    """Return the check whether a driver for containers works."""

    async def check() -> str:
        return find_driver(roots, run).lines

    return check


def toolkit_check(run: Run = run_program, has: Callable[[Path], bool] = is_there) -> Check:
    """Return the check whether the container toolkit gives GPUs to containers."""

    async def check() -> str:
        check_toolkit(run, has)
        return ""

    return check


def plugin_check(client: Client, node: NodeName) -> Check:
    """Return the check whether a node offers GPUs, or parts of GPUs, to containers."""

    async def check() -> str:
        allocatable = (await client.get(NODES, node, Node)).status.allocatable
        if not any(name.startswith(GPU_RESOURCES) and count != "0" for name, count in allocatable.items()):
            raise NotReadyError(
                f"node {node} offers no nvidia.com/gpu and no nvidia.com/mig-...: no device plugin has registered"
            )
        return ""

    return check


def unused_check(look: Callable[[], UnitState]) -> Check:
    """Return the check whether all GPUs are free of VMs, before a driver for containers binds all of them."""

    async def check() -> str:
        state = look()
        if not state.inventory.gpus:
            raise NotReadyError("no GPU found on this host, so it is unknown whether VMs use one: is /sys mounted?")
        if reasons := why_not_unused(state):
            raise NotReadyError(f"a driver for containers would take GPUs from VMs: {in_words(reasons)}")
        return ""

    return check


async def validate(check: Check, marker: Marker | None, clock: Clock, *, wait: bool) -> None:
    """Run a check and write its file. With `wait`, repeat it until it passes; else raise its GpuvirtError."""
    logged = ""
    while True:
        try:
            content = await check()
            if marker is not None:
                marker.write(content)
        except GpuvirtError as error:
            if marker is not None:
                marker.remove()
            if not wait:
                raise
            if str(error) != logged:
                log.warning("%s", error)
            logged = str(error)
        else:
            return
        await clock.sleep(EVERY_S)


async def await_marker(marker: Marker, clock: Clock) -> None:
    """Return once a file exists."""
    if not marker.is_there:
        log.info("waiting for %s", marker.path)
    while not marker.is_there:
        await clock.sleep(EVERY_S)


async def rest(folder: Path) -> None:
    """Wait for SIGTERM or SIGINT, and then remove the files, because no process repeats their checks any more."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    log.info("this node is ready for containers with GPUs")
    await stopping.wait()
    for name in (DRIVER, TOOLKIT, PLUGIN):
        Marker(folder / name).remove()
