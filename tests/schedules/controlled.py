"""A controller that runs schedules, in this process, with a cluster whose workers are VMs of a simulated vCenter."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from gpuvirt.clock import Clock
from gpuvirt.controller.process import ControllerOptions, ControllerProcess
from gpuvirt.controller.schedulespart import load_schedules
from gpuvirt.controller.settings import ControllerSettings
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt_schedules.hypervisors.childprocess import ChildProcess
from tests.hypervisors.simulated import Center, center
from tests.kube.scriptedapi import scripted
from tests.schedules.fastclock import FastClock
from tests.schedules.vmcluster import VmCluster
from tests.web.certificates import Authority, Pair

WORKERS = ("worker0", "worker1", "worker2", "worker3")
"""The workers of the day; the one of the night is worker4."""


def controller(port: int, ca: Path, clock: Clock, *, elects: bool = False) -> ControllerProcess:
    """Return a controller that runs schedules: it leads at once, or once it has the lease."""
    credentials = Credentials("127.0.0.1", port, "gpuvirt", ca=ca, token=b"x")
    settings = ControllerSettings("gpuvirt")
    return ControllerProcess(
        ControllerOptions(credentials, settings, elects=elects, schedules=load_schedules(), clock=clock)
    )


@contextmanager
def vm_cluster(
    folder: Path, authority: Authority, clock: FastClock, *options: str
) -> Iterator[tuple[VmCluster, Center]]:
    """Run a vCenter, and provide the cluster of its VMs."""
    with center(folder, authority, *options) as vcenter:
        yield VmCluster(vcenter.vsphere, vcenter.credentials, clock), vcenter


@asynccontextmanager
async def living(cluster: VmCluster) -> AsyncIterator[None]:
    """Let a cluster live."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(cluster.live())
        yield
        task.cancel()


@asynccontextmanager
async def controlled(
    cluster: VmCluster, server: Pair, ca: Path, *, elects: bool = False
) -> AsyncIterator[ControllerProcess]:
    """Let a cluster live, with a controller."""
    async with scripted(cluster.answer, server, ca) as api, living(cluster), asyncio.TaskGroup() as group:
        process = controller(api.port, ca, cluster.clock, elects=elects)
        task = group.create_task(process.run())
        yield process
        task.cancel()
    await killed_children_ended()


async def killed_children_ended() -> None:
    """Wait for the children of this loop's connections.

    A controller that is cancelled while it replaces a connection has killed the child, and does not wait for its end:
    the loop of the test would close before, and the warning of that would fail a later test.
    """
    loop = asyncio.get_running_loop()
    for child in [found for found in gc.get_objects() if isinstance(found, ChildProcess) and not found.is_gone]:
        if child._gone.get_loop() is loop:
            child.kill()
            async with asyncio.timeout(30.0):
                await child.ended()
