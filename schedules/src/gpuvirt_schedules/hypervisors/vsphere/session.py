"""The session of one user at a vCenter: it logs in with the first request, and again when the vCenter has ended it."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from pyVmomi import vim
from pyVmomi.SoapAdapter import SoapStubAdapter

from gpuvirt_schedules.hypervisors import resets
from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import MOST_CALLS, Problem
from gpuvirt_schedules.hypervisors.vsphere.faults import problem_of

API = "vim.version.v7_0"
"""The oldest vSphere with all that is read here; newer ones answer in its terms. To ask for the server's versions, as
SmartConnect does, has no timeout."""
PORT = 443
ANSWER_S = 20
"""How long the vCenter may take to answer: less than the connection waits for the child (`connection.REQUEST_S`)."""
KEPT_S = 20
"""How long an unused connection is kept. A vCenter's proxy closes idle ones, and a call must not meet a closed one."""

T = TypeVar("T")


class VsphereSession:
    """One user's session; several threads use it at once."""

    def __init__(self, server: str, ca: str, user: str, password: str) -> None:
        self._server, self._ca = server, ca
        self._user, self._password = user, password
        self._login = threading.Lock()
        self._content: vim.ServiceInstanceContent | None = None
        self._refusal: BackEndError | None = None
        """The refusal of user and password. They are not tried again: a vCenter locks a user after five failures."""

    def run(self, ask: Callable[[vim.ServiceInstanceContent], T]) -> T:
        """Run a function of the API's content, once more with a new session if the last one has ended.

        What an ended session refuses has certainly not been carried out, so a call may be made again. A reading of an
        ended session can also lack properties. Raises BackEndError.
        """
        content = self._logged_in()
        try:
            return ask(content)
        except BackEndError as error:
            if error.problem not in {Problem.SESSION_LOST, Problem.INCOMPLETE} or not error.is_certain:
                raise
            self._forget(content)
        return ask(self._logged_in())

    def _logged_in(self) -> vim.ServiceInstanceContent:
        with self._login:
            if self._refusal is not None:
                raise self._refusal
            if self._content is None:
                try:
                    self._content = self._connected()
                except BackEndError:
                    raise
                except Exception as error:
                    problem = problem_of(error, is_certain=True)
                    self._refusal = problem if problem.problem is Problem.WRONG_CREDENTIALS else None
                    raise problem from error
            return self._content

    def _connected(self) -> vim.ServiceInstanceContent:
        host, port = place(self._server)
        stub = SoapStubAdapter(
            host,
            port,
            version=API,
            sslContext=resets.context(self._ca),
            httpConnectionTimeout=ANSWER_S,
            connectionPoolTimeout=KEPT_S,
            poolSize=MOST_CALLS,  # each request of a call would need another TLS handshake
        )
        content: vim.ServiceInstanceContent = vim.ServiceInstance("ServiceInstance", stub).RetrieveContent()
        if content.sessionManager is None:
            raise BackEndError(Problem.INCOMPLETE, "the server is neither a vCenter nor an ESX host", is_certain=True)
        content.sessionManager.Login(self._user, self._password, None)
        return content

    def _forget(self, content: vim.ServiceInstanceContent) -> None:
        with self._login:
            if self._content is not content:
                return
            self._content = None
        if content.sessionManager is not None:
            with suppress(Exception):  # it has ended; otherwise it would count against the user's limit
                content.sessionManager.Logout()


def place(server: str) -> tuple[str, int]:
    """Return host and port of `HOST`, `HOST:PORT` or `https://HOST:PORT/sdk`; raises BackEndError."""
    try:
        parts = urlsplit(server if "//" in server else f"https://{server}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or ("//" in server and not server.startswith("https://")):
        raise BackEndError(Problem.UNREACHABLE, f"{server!r} is not HOST or HOST:PORT", is_certain=True)
    return host, PORT if port is None else port
