"""Uninstalling, put together: one who takes the lease from every controller, and then takes all away."""

import socket
from collections.abc import Callable
from random import Random

from gpuvirt.apps.controller import LEASE
from gpuvirt.clock import RealClock
from gpuvirt.cluster.access.credentials import Credentials
from gpuvirt.cluster.client import Client
from gpuvirt.cluster.election import Candidacy, Election
from gpuvirt.install.uninstalling import Goals, Uninstaller

HOLDER = "uninstall-"
"""What the identity of one who uninstalls begins with, in the lease that keeps controllers from leading."""


async def run(credentials: Credentials, goals: Goals, say: Callable[[str], None]) -> None:
    """Take away what is to go, and say each thing that was done; raises ApiError, StillThereError."""
    client, clock = Client(credentials), RealClock()
    candidacy = Candidacy(goals.namespace, LEASE, f"{HOLDER}{socket.gethostname()}")
    election = Election(client, candidacy, clock, Random())  # noqa: S311  no secrets
    async for line in Uninstaller(client, goals, clock, election).run():
        say(line)
