"""The session of one user at a vCenter: it logs in with the first request, and again when the vCenter has ended it."""

import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from typing import TypeVar
from urllib.parse import urlsplit

from pyVmomi import vim, vmodl
from pyVmomi.SoapAdapter import SoapStubAdapter

from gpuvirt_schedules.hypervisors import resets
from gpuvirt_schedules.hypervisors.messages import MOST_CALLS, BackEndError, Problem

FAULTS: tuple[tuple[type[Exception], Problem, bool], ...] = (
    # NotAuthenticated is a NoPermission, so the order counts.
    (vim.fault.NotAuthenticated, Problem.SESSION_LOST, True),
    (vim.fault.InvalidLogin, Problem.WRONG_CREDENTIALS, True),
    (vim.fault.NoPermission, Problem.FORBIDDEN, True),
    (vim.fault.InsufficientGraphicsResourcesFault, Problem.NO_CAPACITY, True),
    (vim.fault.InvalidPowerState, Problem.WRONG_POWER, True),
    (vim.fault.ToolsUnavailable, Problem.TOOLS_MISSING, True),
    (vmodl.fault.ManagedObjectNotFound, Problem.VM_MISSING, True),
    # The vCenter could not find out what its host has done.
    (vmodl.fault.SystemError, Problem.FAILED, False),
    (vmodl.fault.HostCommunication, Problem.FAILED, False),
    (vim.fault.Timedout, Problem.FAILED, False),
    (vmodl.MethodFault, Problem.REFUSED, True),
)
"""Each fault, its problem, and whether the call has certainly not been carried out."""


def problem_of(error: Exception, *, is_certain: bool) -> BackEndError:
    """Return the error for any exception of pyVmomi; `is_certain`: nothing can have been sent that changes a VM."""
    for fault, problem, was_refused in FAULTS:
        if isinstance(error, fault):
            return BackEndError(problem, _words(error), is_certain=is_certain or was_refused)
    if isinstance(error, ssl.SSLError):
        return BackEndError(Problem.NOT_TRUSTED, _reason(error), is_certain=is_certain)
    if isinstance(error, OSError | HTTPException):
        return BackEndError(Problem.UNREACHABLE, _reason(error), is_certain=is_certain)
    return BackEndError(Problem.INCOMPLETE, f"{type(error).__name__}: {error}", is_certain=is_certain)


def _words(fault: Exception) -> str:
    name = type(fault).__name__.rpartition(".")[2]
    text = str(getattr(fault, "msg", None) or "")
    if isinstance(fault, vim.fault.InvalidPowerState):
        text = f"{text} the VM is {fault.existingState}".strip()
    return f"{name}: {text}" if text else name


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    text = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
    return str(text) or type(error).__name__


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
