"""A host with libvirt and worker VMs, and connections to it."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from lab.libvirt.host import LibvirtHost, TlsFiles, libvirt_host

from gpuvirt.model.workers.connection import HypervisorCredentials, HypervisorKind
from gpuvirt.model.workers.hypervisor import VmKey
from gpuvirt_schedules.hypervisors.connection import ChildHypervisor
from tests.hypervisors.simulated import PATIENCE_S, connected
from tests.web.certificates import Authority

WORKERS = 3
MDEV_UUID = UUID("c2177883-f1bb-47f0-914d-32a22e3a8804")
MDEV = f"""
<hostdev mode='subsystem' type='mdev' managed='no' model='vfio-pci'>
  <source><address uuid='{MDEV_UUID}'/></source>
</hostdev>
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running host, with what a Secret has of it."""

    host: LibvirtHost
    credentials: HypervisorCredentials


def uuid(number: int) -> UUID:
    """Return the UUID of a worker."""
    return UUID(f"5017bbbb-0000-4000-8000-{number:012}")


def key(number: int) -> VmKey:
    """Return the key of a worker."""
    return VmKey(str(uuid(number)))


@contextmanager
def server(folder: Path, authority: Authority, *more: str) -> Iterator[Server]:
    """Run a host with workers that are off; `more` are lines of libvirtd.conf."""
    pair, client = authority.server("host", alternatives="IP:127.0.0.1"), authority.client("gpuvirt")
    with libvirt_host(folder, TlsFiles(authority.certificate, pair.certificate, pair.key), *more) as running:
        for number in range(WORKERS):
            running.define(f"worker{number}", uuid(number))
        ca, certificate, private = (
            file.read_text() for file in (authority.certificate, client.certificate, client.key)
        )
        yield Server(
            running, HypervisorCredentials(f"127.0.0.1:{running.port}", ca, certificate=certificate, key=private)
        )


@asynccontextmanager
async def libvirt_connected(
    credentials: HypervisorCredentials, *, request_s: float = PATIENCE_S, until_s: float = math.inf
) -> AsyncIterator[ChildHypervisor]:
    """Open a connection; nothing needs to answer."""
    kind = HypervisorKind.LIBVIRT
    async with connected(credentials, request_s=request_s, until_s=lambda: until_s, kind=kind) as hypervisor:
        yield hypervisor
