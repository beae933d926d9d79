"""QEMU's control channel: commands and answers as lines of JSON."""

import json
import socket
import struct
from collections.abc import Mapping

from lab.kernel.errors import LabError

Json = None | bool | int | str | list["Json"] | dict[str, "Json"]


class Qmp:
    """A connection that QEMU has opened to this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rw")
        self._lines.readline()  # QEMU's greeting
        self.command("qmp_capabilities")

    @property
    def pid(self) -> int:
        """The process id of QEMU."""
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    def command(self, name: str, arguments: Mapping[str, Json] | None = None) -> Json:
        """Execute a command and return its answer."""
        self._lines.write(json.dumps({"execute": name, "arguments": arguments or {}}) + "\n")
        self._lines.flush()
        for line in self._lines:
            answer: dict[str, Json] = json.loads(line)
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise LabError(f"QEMU's {name}: {answer['error']}")
        raise LabError(f"QEMU has ended during {name}")

    def monitor(self, line: str) -> str:
        """Execute a command of the human monitor and return what it prints."""
        return str(self.command("human-monitor-command", {"command-line": line}))

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._connection.close()
