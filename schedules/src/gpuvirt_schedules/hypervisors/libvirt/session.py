"""The connections of one client to a host. Each has one thread at a time.

With libvirt 9.0 over TLS, the third request beside one that waits on the same connection was never answered (tried).
And a server takes no more than five requests of a connection at once, while a save or a resume is answered when all
memory is written or read. So each call has a connection of its own, and readings have those that no other thread uses.

The certificates and the key that libvirt reads are files that are in memory alone, and end with this process.
"""

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import libvirt

from gpuvirt_schedules.hypervisors import resets
from gpuvirt_schedules.hypervisors.messages import BackEndError, Problem

FAULTS = {
    libvirt.VIR_ERR_NO_DOMAIN: Problem.VM_MISSING,
    libvirt.VIR_ERR_ACCESS_DENIED: Problem.FORBIDDEN,
    libvirt.VIR_ERR_OPERATION_DENIED: Problem.FORBIDDEN,
    libvirt.VIR_ERR_OPERATION_INVALID: Problem.REFUSED,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED: Problem.REFUSED,
    libvirt.VIR_ERR_NO_SUPPORT: Problem.REFUSED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED: Problem.REFUSED,
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED: Problem.REFUSED,
    libvirt.VIR_ERR_INVALID_ARG: Problem.REFUSED,
}
"""The codes with which libvirt refuses a call before it does anything.

All others say that something failed on the way: QEMU did not start, an image could not be written, a job took too long.
"""
OPENING = (
    ("Failed to verify peer's certificate", Problem.NOT_TRUSTED),
    ("Our own certificate", Problem.NOT_TRUSTED),
    ("CA certificate", Problem.NOT_TRUSTED),
    ("x509 key and certificate", Problem.WRONG_CREDENTIALS),
    ("client certificate", Problem.WRONG_CREDENTIALS),
    # The server closes the connection once it has seen the client's certificate.
    ("Unable to read TLS confirmation", Problem.WRONG_CREDENTIALS),
    ("authentication failed: No authentication", Problem.WRONG_CREDENTIALS),
    ("no authentication callback", Problem.WRONG_CREDENTIALS),
)
"""The English messages of TLS, which a process that sets no locale always gets; the codes tell nothing apart."""


def opening_problem(error: libvirt.libvirtError, folder: str) -> BackEndError:
    """Return the error for a connection that could not be opened; `folder` is not shown."""
    text = words(error).replace(f"{folder}/", "")
    problem = next((problem for part, problem in OPENING if part in text), Problem.UNREACHABLE)
    return BackEndError(problem, text, is_certain=True)


def problem_of(error: Exception, *, is_certain: bool, is_alive: bool = True) -> BackEndError:
    """Return the error for any exception of libvirt; `is_certain`: nothing can have been sent that changes a VM.

    `is_alive`: whether the connection was still open after it.
    """
    if not isinstance(error, libvirt.libvirtError):
        return BackEndError(Problem.INCOMPLETE, f"{type(error).__name__}: {error}", is_certain=is_certain)
    if not is_alive:
        return BackEndError(Problem.UNREACHABLE, words(error), is_certain=is_certain)
    problem = FAULTS.get(error.get_error_code() or 0)
    if problem is None:
        return BackEndError(Problem.FAILED, words(error), is_certain=is_certain)
    return BackEndError(problem, words(error), is_certain=True)


def is_open(connection: libvirt.virConnect) -> bool:
    """Return whether a connection has not ended yet."""
    try:
        return connection.isAlive() == 1
    except libvirt.libvirtError:
        return False


def words(error: libvirt.libvirtError) -> str:
    """Return libvirt's message."""
    return error.get_error_message() or str(error)


PORT = 16514
T = TypeVar("T")

MEMORY = Path("/dev/shm")  # noqa: S108  a folder of links, in one that containers can write to

PREFIX = "gpuvirt-libvirt-"
FIRST = "cacert.pem"


class CredentialFiles:
    """A CA, a client's certificate and its key."""

    def __init__(self, ca: str, certificate: str, key: str) -> None:
        """Raises OSError."""
        texts = {FIRST: ca, "clientcert.pem": certificate, "clientkey.pem": key}
        self._files = {name: os.memfd_create(name, os.MFD_CLOEXEC) for name in texts}
        for name, text in texts.items():
            os.truncate(self._files[name], len(data := text.encode()))
            os.pwrite(self._files[name], data, 0)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Provide a folder in which libvirt finds them, for the time of opening a connection; raises OSError.

        It has links to this process's files in memory. A child that is killed meanwhile leaves links to nothing, which
        the next one removes: a host that hangs is asked again and again.
        """
        root = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_left(root)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        try:
            for name, fd in self._files.items():
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_left(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user
            link = folder / FIRST
            if folder.stat().st_uid == os.geteuid() and link.is_symlink() and not link.exists():
                shutil.rmtree(folder)


class LibvirtSession:
    """One client's connections; several threads use it at once."""

    def __init__(self, server: str, ca: str, certificate: str, key: str) -> None:
        """Connect to nothing yet."""
        self._server = server
        self._texts = (ca, certificate, key)
        self._opening = threading.Lock()
        self._files: CredentialFiles | None = None
        self._taking = threading.Lock()
        self._unused: list[libvirt.virConnect] = []
        self._refusal: BackEndError | None = None
        """The refusal of the client's certificate, which is not tried again."""
        libvirt.registerErrorHandler(lambda *_: None, None)  # prints nothing; errors are raised, too

    def run(self, ask: Callable[[libvirt.virConnect], T]) -> T:
        """Run a function that changes nothing, once more with a new connection if the last one has ended.

        Raises BackEndError.
        """
        with self._taking:
            connection = self._unused.pop() if self._unused else None
        if connection is not None:
            try:
                return self._asked(connection, ask)
            except BackEndError:
                if is_open(connection):
                    raise
            with self._taking:
                self._unused.clear()  # what ended this one has ended them
        return self._asked(self.opened(), ask)

    def opened(self) -> libvirt.virConnect:
        """Return a new connection, whose end is a reset; raises BackEndError."""
        uri = _uri(self._server)
        with self._opening:
            if self._refusal is not None:
                raise self._refusal
            try:
                self._files = self._files or CredentialFiles(*self._texts)
                with self._files.folder() as folder:
                    connection = _opened(f"{uri}?pkipath={quote(str(folder))}", str(folder))
            except OSError as error:
                raise BackEndError(Problem.FAILED, f"no file for TLS: {error}", is_certain=True) from error
            except BackEndError as error:
                self._refusal = error if error.problem is Problem.WRONG_CREDENTIALS else None
                raise
        # libvirt's sockets are its own: what has been sent by now was a greeting.
        resets.reset_connections()
        return connection

    def _asked(self, connection: libvirt.virConnect, ask: Callable[[libvirt.virConnect], T]) -> T:
        try:
            found = ask(connection)
        except Exception as error:
            is_alive = is_open(connection)
            if is_alive:
                self._keep(connection)
            raise _certain(error, is_alive=is_alive) from error
        self._keep(connection)
        return found

    def _keep(self, connection: libvirt.virConnect) -> None:
        with self._taking:
            self._unused.append(connection)


def _opened(uri: str, folder: str) -> libvirt.virConnect:
    try:
        return libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise opening_problem(error, folder) from error


def _certain(error: Exception, *, is_alive: bool) -> BackEndError:
    return error if isinstance(error, BackEndError) else problem_of(error, is_certain=True, is_alive=is_alive)


def _uri(server: str) -> str:
    """Return the URI of `HOST` or `HOST:PORT`; raises BackEndError.

    No other URI is taken: parameters of one could switch TLS off, or run a program.
    """
    try:
        parts = urlsplit(f"//{server}")
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if host is None or parts.netloc != server or "@" in server:
        raise BackEndError(Problem.UNREACHABLE, f"{server!r} is not HOST or HOST:PORT", is_certain=True)
    shown = f"[{host}]" if ":" in host else quote(host)
    return f"qemu+tls://{shown}:{PORT if port is None else port}/system"
