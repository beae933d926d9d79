"""A check of a node for containers, made until it holds, and the file that says so to those who wait for it.

A file is written once its check holds, and taken away as soon as one fails: what others start on was so a moment ago.
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
"""Returns what the file is to say; raises GpuvirtError where the check does not hold."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A file that says that something is so."""

    path: Path

    @property
    def is_there(self) -> bool:
        """Whether it says so now."""
        return self.path.exists()

    def write(self, content: str) -> None:
        """Have it say so."""
        replace_file(self.path, content.encode(), durable=False, mode=0o644)
        log.info("%s is there", self.path)

    def remove(self) -> None:
        """Have it not say so."""
        self.path.unlink(missing_ok=True)


def driver_check(roots: DriverRoots, run: Run = run_program) -> Check:
    """Return the check that a driver works."""

    async def check() -> str:
        return find_driver(roots, run).lines

    return check


def toolkit_check(run: Run = run_program, has: Callable[[Path], bool] = is_there) -> Check:
    """Return the check that the container toolkit gives containers GPUs."""

    async def check() -> str:
        check_toolkit(run, has)
        return ""

    return check


def plugin_check(client: Client, node: NodeName) -> Check:
    """Return the check that a node offers GPUs, or parts of GPUs, to containers."""

    async def check() -> str:
        allocatable = (await client.get(NODES, node, Node)).status.allocatable
        if not any(name.startswith(GPU_RESOURCES) and count != "0" for name, count in allocatable.items()):
            raise NotReadyError(
                f"node {node} offers no nvidia.com/gpu and no nvidia.com/mig-...: no plugin has registered"
            )
        return ""

    return check


def unused_check(look: Callable[[], UnitState]) -> Check:
    """Return the check that no VM can be using a GPU, before a driver for containers takes all of them."""

    async def check() -> str:
        seen = look()
        if not seen.inventory.gpus:
            raise NotReadyError(
                "no GPU is seen on this host, so whether VMs use any is not known: is its /sys mounted?"
            )
        if reasons := why_not_unused(seen):
            raise NotReadyError(f"a driver for containers would take GPUs from VMs: {in_words(reasons)}")
        return ""

    return check


async def validate(check: Check, marker: Marker | None, clock: Clock, *, wait: bool) -> None:
    """Make a check and write its file; where it does not hold, again and again, or raise GpuvirtError."""
    said = ""
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
            if str(error) != said:
                log.warning("%s", error)
            said = str(error)
        else:
            return
        await clock.sleep(EVERY_S)


async def await_marker(marker: Marker, clock: Clock) -> None:
    """Return once a file is there."""
    if not marker.is_there:
        log.info("waiting for %s", marker.path)
    while not marker.is_there:
        await clock.sleep(EVERY_S)


async def rest(folder: Path) -> None:
    """Do nothing until SIGTERM or SIGINT, and take the files away then: nobody keeps what they say true any more."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    log.info("this node is ready for containers with GPUs")
    await told.wait()
    for name in (DRIVER, TOOLKIT, PLUGIN):
        Marker(folder / name).remove()
