"""A process of the extender that does not lead."""

from random import Random

from gpuvirt.clock import RealClock
from gpuvirt.extender.extender import Extender
from gpuvirt.kube.access.credentials import Credentials
from gpuvirt.kube.client import Client
from gpuvirt.shares.sharing import Sharing


class Standby:
    """A process that does not lead, and has listed nothing yet."""

    def __init__(self) -> None:
        credentials = Credentials("127.0.0.1", 1, "gpuvirt")
        random = Random(1)  # noqa: S311  it keeps no secrets
        self.extender = Extender(Client(credentials), Sharing(), RealClock(), random, lambda: False)

    @property
    def missing(self) -> str | None:
        return self.extender.unlisted
