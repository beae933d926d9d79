"""The agent in the guest, which serves calls over the virtio-serial port, one after another.

Child processes make the calls that may block, so that the agent always answers.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from gpuvirt.errors import GpuvirtError
from gpuvirt.facts.ids import IommuGroup
from gpuvirt.hardware.access.kernel import RealKernel
from gpuvirt.paths import HostPath, HostRoots
from lab.kernel.inside.beginning import Beginning
from lab.kernel.inside.caller import Caller
from lab.kernel.inside.nodeuser import NodeUser
from lab.kernel.inside.vfiouser import VfioUser, use_devices, use_group

Value = None | int | str | list[str]

PATIENCE_S = 10.0
"""How long a caller may take to end when nothing blocks it."""


class Agent:
    """The calls by their names; all arguments are texts."""

    def __init__(self) -> None:
        self.kernel = RealKernel(HostRoots.under(Path("/")))
        self._numbers = count(1)
        self._leases: dict[int, AbstractContextManager[None]] = {}
        self._users: dict[int, VfioUser] = {}
        self._callers: dict[int, Caller] = {}
        self._node_users: dict[int, NodeUser] = {}
        self._beginning = Beginning()
        self.calls: dict[str, Callable[[list[str]], Value]] = {
            "read": lambda a: self.kernel.read(HostPath(a[0]), limit=int(a[1])).decode("latin-1"),
            "write": lambda a: self.kernel.write(HostPath(a[0]), a[1].encode("latin-1")),
            "listdir": lambda a: list(self.kernel.listdir(HostPath(a[0]))),
            "readlink": lambda a: self.kernel.readlink(HostPath(a[0])),
            "device_number": lambda a: self.kernel.device_number(HostPath(a[0])),
            "open_files": lambda a: [
                f"{found.pid} {found.device} {found.path}" for found in self.kernel.open_files(mapped=a[0] == "1")
            ],
            "pids": lambda _: [str(pid) for pid in self.kernel.pids],
            "lease": lambda a: self._lease(self.kernel.lease(IommuGroup(int(a[0])))),
            "lease_devices": lambda a: self._lease(self.kernel.lease_devices(a)),
            "release": lambda a: self._release(int(a[0])),
            "user_of_group": lambda a: self._user_start(use_group(int(a[0]), devices=a[1] == "devices")),
            "user_of_devices": lambda a: self._user_start(use_devices(a[1:], bind=a[0] == "bound")),
            "user_asked_back": lambda a: int(self._users[int(a[0])].asked_back(float(a[1]))),
            "user_end": lambda a: self._users.pop(int(a[0])).end(),
            "node_user": lambda a: self._node_user_start(a[0]),
            "node_user_pid": lambda a: self._node_users[int(a[0])].pid,
            "node_user_failure": lambda a: self._node_users[int(a[0])].failure(float(a[1])),
            "node_user_end": lambda a: self._node_users.pop(int(a[0])).end(),
            "caller_write": lambda a: self._caller_start(a[0], a[1].encode("latin-1")),
            "caller_read": lambda a: self._caller_start(a[0], None),
            "caller_answer": self._caller_answer,
            "caller_pid": lambda a: self._callers[int(a[0])].pid,
            "caller_kill": lambda a: self._callers[int(a[0])].kill(),
            "run": lambda a: subprocess.run(a, capture_output=True, text=True, check=True).stdout,
            "restore": lambda _: self._restore(),
        }

    def _lease(self, lease: AbstractContextManager[None]) -> int:
        lease.__enter__()
        number = next(self._numbers)
        self._leases[number] = lease
        return number

    def _release(self, number: int) -> None:
        self._leases.pop(number).__exit__(None, None, None)

    def _user_start(self, user: VfioUser) -> int:
        number = next(self._numbers)
        self._users[number] = user
        return number

    def _node_user_start(self, path: str) -> int:
        number = next(self._numbers)
        self._node_users[number] = NodeUser(path)
        return number

    def _caller_start(self, path: str, data: bytes | None) -> int:
        number = next(self._numbers)
        self._callers[number] = Caller(path, data)
        return number

    def _caller_answer(self, arguments: list[str]) -> Value:
        data = self._callers[int(arguments[0])].answer(float(arguments[1]))
        return None if data is None else data.decode("latin-1")

    def _restore(self) -> list[str]:
        for user in self._users.values():
            user.end()
        for node_user in self._node_users.values():
            node_user.end()
        for number in list(self._leases):
            self._release(number)
        stuck = [str(caller.pid) for caller in self._callers.values() if not caller.end(PATIENCE_S)]
        self._users.clear()
        self._node_users.clear()
        self._callers.clear()
        return stuck or self._beginning.restore()


class Port:
    """The virtio-serial port."""

    def __init__(self) -> None:
        name = next(
            entry.parent.name
            for entry in Path("/sys/class/virtio-ports").glob("*/name")
            if entry.read_text().strip() == "agent"
        )
        self._fd = os.open(f"/dev/{name}", os.O_RDWR)
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, message: dict[str, Value]) -> None:
        """Send a message as a line."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]

    def receive(self) -> dict[str, Value]:
        """Return the next message."""
        while b"\n" not in self._rest:
            data = os.read(self._fd, 1 << 16)
            if not data:  # no process is connected at the other end
                time.sleep(0.05)
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Value] = json.loads(line)
        return message


def answer(agent: Agent, name: str, arguments: list[str]) -> dict[str, Value]:
    """Make one call, and return its answer."""
    try:
        return {"value": agent.calls[name](arguments)}
    except OSError as error:
        failure: dict[str, Value] = {"errno": error.errno or -1, "message": error.strerror or str(error)}
        return failure | ({"path": str(error.filename)} if error.filename is not None else {})
    except (GpuvirtError, LookupError, ValueError, subprocess.SubprocessError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def main() -> None:
    """Serve calls for as long as the guest runs."""
    port, agent = Port(), Agent()
    stop = agent.kernel.on_uevent(lambda: port.send({"uevent": 1}))  # a reference keeps the watch alive
    port.send({"ready": 1})
    while request := port.receive():
        arguments = request["arguments"]
        assert isinstance(arguments, list)  # noqa: S101
        port.send({"number": request["number"], **answer(agent, str(request["call"]), arguments)})
    stop()


if __name__ == "__main__":
    main()
