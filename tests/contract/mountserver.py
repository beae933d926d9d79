"""A mounted simulated host that executes commands from standard input.

start GROUP devices|group, asked_back PROCESS SECONDS, end PROCESS; the reply to each is a line of JSON.
"""

import json
import sys
import threading
from pathlib import Path

from gpuvirt.facts.ids import IommuGroup
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.hostspec import load_host
from gpuvirt_sim.kernel import Process, SimKernel
from gpuvirt_sim.mounted.mounting import serve
from gpuvirt_sim.mounted.nodes import Nodes


def say(line: str) -> None:
    """Print a line for the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Director:
    """Executes commands."""

    def __init__(self, kernel: SimKernel) -> None:
        self._kernel = kernel
        self._processes: dict[int, tuple[Process, int]] = {}

    def do(self, word: str, number: int, how: str) -> int:
        """Execute a command, and return its number."""
        if word == "start":
            asked = len(self._kernel.vfio.requests)
            process = self._kernel.start_vm(IommuGroup(number), devices=how == "devices")
            self._processes[process.pid] = process, asked
            return process.pid
        process, asked = self._processes[number]
        if word == "asked_back":
            with self._kernel.blocking.condition:
                requests = self._kernel.vfio.requests
                return int(self._kernel.blocking.condition.wait_for(lambda: len(requests) > asked, float(how)))
        self._kernel.end_vm(process)
        return 0

    def obey(self) -> None:
        """Execute commands until standard input is closed."""
        for line in sys.stdin:
            word, number, how = (*line.split(), "")[:3]
            try:
                answer = {"value": self.do(word, int(number), how)}
            except OSError as error:
                answer = {"errno": error.errno or -1}
            say(json.dumps(answer))


def main() -> None:
    """Mount at the given folder."""
    kernel = build_host(load_host(str(Path(__file__).parent / "host.yaml")), wait=True)
    threading.Thread(target=Director(kernel).obey, daemon=True).start()
    serve(kernel, Path(sys.argv[1]), Nodes.FILES, lambda: say("ready"))


if __name__ == "__main__":
    main()
