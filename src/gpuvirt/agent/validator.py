"""Checks that a node is ready for containers with GPUs, and the files for which the operands wait.

A file is written once its check succeeds, and removed as soon as the check fails: an operand that finds the file starts
on a node that was ready a moment ago.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from gpuvirt.agent.store.files import replace_file
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import NodeName
from gpuvirt.hardware.access.tools import Run, exists, run_program
from gpuvirt.hardware.programs.containerdriver import DriverRoots, NotReadyError, check_toolkit, find_driver
from gpuvirt.kube.client import Client
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.labels import GPU_RESOURCES, SHARES_RESOURCE
from gpuvirt.kube.resources import NODES
from gpuvirt.model.change.driverplanning import why_not_unused
from gpuvirt.model.change.state import UnitState
from gpuvirt.model.reasons import reasons_text

log = logging.getLogger(__name__)

DRIVER, TOOLKIT, PLUGIN = (f"{name}-ready" for name in ("driver", "toolkit", "plugin"))
EVERY_S = 5.0

Check = Callable[[], Awaitable[str]]
"""Returns the content of the file; raises GpuvirtError if the check fails."""


class Marker(msgspec.Struct, frozen=True):
    """A file that exists while its check succeeds."""

    path: Path

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self.path.exists()

    def write(self, content: str) -> None:
        """Write the file."""
        replace_file(self.path, content.encode(), durable=False, mode=0o644)
        log.info("wrote %s", self.path)

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self.path.unlink(missing_ok=True)


def driver_check(roots: DriverRoots, run: Run = run_program) -> Check:
    """Return the check that the NVIDIA driver works."""

    async def check() -> str:
        return find_driver(roots, run).lines

    return check


def toolkit_check(run: Run = run_program, has: Callable[[Path], bool] = exists) -> Check:
    """Return the check that containers get GPUs from the NVIDIA Container Toolkit."""

    async def check() -> str:
        check_toolkit(run, has)
        return ""

    return check


def plugin_check(client: Client, node: NodeName) -> Check:
    """Return the check that a node has allocatable GPUs, MIG devices or units of shared GPUs for containers."""

    async def check() -> str:
        allocatable = (await client.get(NODES, node, Node)).status.allocatable
        offered = [name for name, count in allocatable.items() if count != "0"]
        if not any(name.startswith(GPU_RESOURCES) or name == SHARES_RESOURCE for name in offered):
            raise NotReadyError(
                f"node {node} has no allocatable nvidia.com/gpu, nvidia.com/mig-... or {SHARES_RESOURCE}: no device"
                " plugin offers any"
            )
        return ""

    return check


def unused_check(observe: Callable[[], UnitState]) -> Check:
    """Return the check that no VM can be using a GPU, before the driver for containers binds all GPUs."""

    async def check() -> str:
        observed = observe()
        if not observed.inventory.gpus:
            raise NotReadyError(
                "no GPU is found on this host, so it is unknown whether VMs use any: is its /sys mounted?"
            )
        if reasons := why_not_unused(observed):
            raise NotReadyError(f"the driver for containers would take GPUs from VMs: {reasons_text(reasons)}")
        return ""

    return check


async def validate(check: Check, marker: Marker | None, clock: Clock, *, wait: bool) -> None:
    """Run a check and write its file; if it fails, repeat it with `wait`, else raise GpuvirtError."""
    last_error = ""
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
            if str(error) != last_error:
                log.warning("%s", error)
            last_error = str(error)
        else:
            return
        await clock.sleep(EVERY_S)


async def await_marker(marker: Marker, clock: Clock) -> None:
    """Wait until a file exists."""
    if not marker.exists:
        log.info("waiting for %s", marker.path)
    while not marker.exists:
        await clock.sleep(EVERY_S)


async def rest(folder: Path) -> None:
    """Wait for SIGTERM or SIGINT, and remove the files then: no process repeats the checks any more."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    log.info("this node is ready for containers with GPUs")
    await stop.wait()
    for name in (DRIVER, TOOLKIT, PLUGIN):
        Marker(folder / name).remove()
