"""Calls to the agent in the guest, as lines of JSON over a virtio-serial port, and events from it."""

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
"""No call takes longer, unless the guest's kernel keeps the agent asleep."""

ERRORS = {error.__name__: error for error in (DeviceBusyError, LeaseUnavailableError)}


class Channel:
    """One connection; calls are made one after another."""

    def __init__(self, connection: socket.socket, logs: Callable[[], str]) -> None:
        """`logs` returns the text for the error when a call is not answered."""
        self.wakers: list[Callable[[], None]] = []
        """Called in a thread of this class at each uevent of the guest's kernel."""
        self._connection = connection
        self._logs = logs
        self._answers: queue.Queue[dict[str, Value]] = queue.Queue()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, name="guest", daemon=True).start()

    def wait_ready(self, within_s: float) -> bool:
        """Return whether the agent has reported in time that it is ready."""
        try:
            return self._answers.get(timeout=within_s).get("ready") == 1
        except queue.Empty:
            return False

    def call(self, name: str, *arguments: str | int, within_s: float = LONG_S) -> Value:
        """Call the agent, and return its answer; raise the error of a failed call."""
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
        """Make a call that returns a text."""
        return str(self.call(name, *arguments))

    def number(self, name: str, *arguments: str | int, within_s: float = LONG_S) -> int:
        """Make a call that returns a number."""
        value = self.call(name, *arguments, within_s=within_s)
        if not isinstance(value, int):
            raise LabError(f"{name} returned {value!r}; expected a number")
        return value

    def texts(self, name: str, *arguments: str | int) -> list[str]:
        """Make a call that returns a list of texts."""
        value = self.call(name, *arguments)
        if not isinstance(value, list):
            raise LabError(f"{name} returned {value!r}; expected a list")
        return value

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _listen(self) -> None:
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    message: dict[str, Value] = json.loads(line)
                    if "uevent" in message:
                        for wake in list(self.wakers):
                            wake()
                    else:
                        self._answers.put(message)
        except (OSError, ValueError):  # the connection was closed, perhaps within a line
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
