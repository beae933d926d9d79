"""Calls to the agent in the guest, as lines of JSON over a virtio-serial port, and what it tells unasked."""

import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable

from gpuvirt.errors import DeviceBusyError, LeaseUnavailableError
from lab.kernel.errors import LabError

Value = None | int | str | list[str]

LONG_S = 240.0
"""No call takes as long; one that does has put the agent to sleep in the guest's kernel."""

ERRORS = {error.__name__: error for error in (DeviceBusyError, LeaseUnavailableError)}


class Channel:
    """One connection. Calls are made one after another."""

    def __init__(self, connection: socket.socket, logs: Callable[[], str]) -> None:
        """Say what `logs` returns when a call is not answered."""
        self.wakers: list[Callable[[], None]] = []
        """Called, in a thread of ours, when the guest's kernel has told of a device."""
        self._connection = connection
        self._logs = logs
        self._answers: queue.Queue[dict[str, Value]] = queue.Queue()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="guest", daemon=True).start()

    def wait_ready(self, within_s: float) -> bool:
        """Return whether the agent has said in time that it is there."""
        try:
            return self._answers.get(timeout=within_s).get("ready") == 1
        except queue.Empty:
            return False

    def call(self, name: str, *arguments: str | int, within_s: float = LONG_S) -> Value:
        """Have the agent do something, and return what it answers; what fails there is raised here."""
        with self._lock:
            number = next(self._numbers)
            request = {"number": number, "call": name, "arguments": [str(argument) for argument in arguments]}
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            while True:
                try:
                    answer = self._answers.get(timeout=within_s)
                except queue.Empty:
                    message = f"the guest has not answered {name} within {within_s} s: {self._logs()}"
                    raise LabError(message) from None
                if answer.get("number") == number:
                    return _value(answer)
                if "gone" in answer:
                    raise LabError(f"the guest has ended: {self._logs()}")

    def text(self, name: str, *arguments: str | int) -> str:
        """Make a call whose answer is a text."""
        return str(self.call(name, *arguments))

    def number(self, name: str, *arguments: str | int, within_s: float = LONG_S) -> int:
        """Make a call whose answer is a number."""
        value = self.call(name, *arguments, within_s=within_s)
        if not isinstance(value, int):
            raise LabError(f"{name} is answered with {value!r}, not with a number")
        return value

    def texts(self, name: str, *arguments: str | int) -> list[str]:
        """Make a call whose answer is a list of texts."""
        value = self.call(name, *arguments)
        if not isinstance(value, list):
            raise LabError(f"{name} is answered with {value!r}, not with a list")
        return value

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _listen(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    said: dict[str, Value] = json.loads(line)
                    if "uevent" in said:
                        for wake in list(self.wakers):
                            wake()
                    else:
                        self._answers.put(said)
        except (OSError, ValueError):  # closed, or ended in the middle of a line
            pass
        self._answers.put({"gone": 1})


def _value(answer: dict[str, Value]) -> Value:
    message = str(answer.get("message"))
    if "errno" in answer:
        number = answer["errno"]
        raise OSError(number if isinstance(number, int) else -1, message, answer.get("path"))
    if "error" in answer:
        raise ERRORS.get(str(answer["error"]), LabError)(message)
    return answer.get("value")
