"""The meaning for a call of an error of libvirt, or of an error on the way to it."""

import libvirt

from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import Problem

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


def words(error: libvirt.libvirtError) -> str:
    """Return libvirt's message."""
    return error.get_error_message() or str(error)
