"""The messages between a connection and its child, and the interface of a back end that answers them in the child.

A message is one JSON object a line, over the child's standard streams.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec
from typing_extensions import override

from gpuvirt.errors import GpuvirtError
from gpuvirt.model.workers.hypervisor import Abilities, Call, VmKey, WorkerVm

MOST_CALLS, MOST_CHECKS = 32, 8
"""How many calls and checks are under way at once in a child, beside one reading. A vCenter's task is watched for 2 s,
so that four hundred VMs are suspended within half a minute."""


class Problem(StrEnum):
    """Why something failed. The child has these words alone; `problems` has the reasons, which the child does not load.

    The first ones are the child's, those after `LEASE_LOST` are found by the process that started it.
    """

    UNREACHABLE = "unreachable"
    NOT_TRUSTED = "not trusted"
    WRONG_CREDENTIALS = "wrong credentials"
    SESSION_LOST = "session lost"
    FORBIDDEN = "forbidden"
    INCOMPLETE = "incomplete"
    REFUSED = "refused"
    FAILED = "failed"
    NO_CAPACITY = "no capacity"
    WRONG_POWER = "wrong power"
    VM_MISSING = "vm missing"
    TOOLS_MISSING = "tools missing"
    NO_SUSPEND = "no suspend"
    TYPE_MISSING = "type missing"
    NOT_ONE_VGPU = "not one vgpu"
    NOT_INSTALLED = "not installed"
    LEASE_LOST = "lease lost"
    SILENT = "silent"
    ENDED = "ended"


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: what to connect to. The connection is made by the first request."""

    kind: str
    server: str
    ca: str
    user: str = ""
    password: str = ""
    certificate: str = ""
    key: str = ""

    @override
    def __repr__(self) -> str:
        """Show no credentials."""
        return f"Start(kind={self.kind!r}, server={self.server!r})"


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """The end of the lease, before each request and after each renewal."""

    until_s: float | None
    """By CLOCK_MONOTONIC, which all processes of a host share; None: no end."""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Asks for all VMs; the answer is `Vms`."""

    id: int


class Make(msgspec.Struct, frozen=True, tag="make"):
    """Makes a call; the answer is `Made`."""

    id: int
    call: Call


class CheckVms(msgspec.Struct, frozen=True, tag="check"):
    """Asks for the possible actions on VMs; the answer is `Checked`."""

    id: int
    vms: tuple[VmKey, ...]


class Vms(msgspec.Struct, frozen=True, tag="vms"):
    """All VMs."""

    id: int
    vms: tuple[WorkerVm, ...]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The hypervisor has carried out the call, or has begun to."""

    id: int


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """The abilities of VMs. The code of an `Ability` is a `Problem`."""

    id: int
    abilities: tuple[Abilities, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request failed."""

    id: int
    problem: Problem
    text: str
    """The hypervisor's words, or the operating system's, without credentials."""
    is_certain: bool
    """Whether the hypervisor has certainly not carried out the call, and will not."""


Request = Read | Make | CheckVms
Order = Start | Renew | Request
Answer = Vms | Made | Checked | Failed

ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def line(message: Order | Answer) -> bytes:
    """Return a message as a line; JSON has no line end within."""
    return msgspec.json.encode(message) + b"\n"


class BackEndError(GpuvirtError):
    """A request to a hypervisor failed."""

    def __init__(self, problem: Problem, text: str, *, is_certain: bool) -> None:
        """`is_certain`: the hypervisor has certainly not carried out the call, and will not."""
        super().__init__(f"{problem}: {text}")
        self.problem = problem
        self.text = text
        self.is_certain = is_certain


class BackEnd(Protocol):
    """The client of one hypervisor, which connects with the first request. All methods raise BackEndError."""

    def read(self) -> Sequence[WorkerVm]:
        """Return all VMs."""
        ...

    def make(self, call: Call) -> None:
        """Make a call once; return when the hypervisor has accepted it."""
        ...

    def check(self, vms: Sequence[VmKey]) -> Sequence[Abilities]:
        """Return the possible actions on these VMs, without VMs that do not exist. Codes are a `Problem`."""
        ...
