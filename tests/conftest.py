"""Fixtures that many tests share."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpuvirt.model.settings import Settings
from gpuvirt.sim.builder import build_machine
from gpuvirt.sim.kernel import SimKernel
from gpuvirt.sim.machine import load_machine
from simnode import SimNode, running_node


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with TemporaryDirectory(prefix="gv-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def machine() -> Callable[[str], SimKernel]:
    """Build a simulated machine by its name."""
    return lambda name: build_machine(load_machine(name), where=name)


@pytest.fixture
async def two_a10(tmp_path: Path) -> AsyncIterator[SimNode]:
    """A running agent on two A10 that are bound to vfio-pci."""
    async with running_node(build_machine(load_machine("2xA10")), tmp_path, Settings()) as node:
        yield node
