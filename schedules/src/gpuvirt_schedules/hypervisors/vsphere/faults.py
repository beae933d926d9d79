"""The meaning for a call of a fault of a vCenter, or of a fault on the way to it."""

import ssl
from http.client import HTTPException

from pyVmomi import vim, vmodl

from gpuvirt_schedules.hypervisors.backend import BackEndError
from gpuvirt_schedules.hypervisors.messages import Problem

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
