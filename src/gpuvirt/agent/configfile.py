"""A file of vGPU configs that may change while the agent runs: a ConfigMap as the kubelet mounts it."""

from collections.abc import Callable
from pathlib import Path

from gpuvirt.agent.loops.intervals import Intervals
from gpuvirt.clock import Clock
from gpuvirt.errors import GpuvirtError
from gpuvirt.loops.serialworker import SerialWorker
from gpuvirt.model.desired.observed import ConfigText, NodeRequest, Observed
from gpuvirt.model.reasons import Reason, Seen, nodeproblems

READ_TIMEOUT_S = 10.0


class ConfigFile:
    """Reads the file at each interval."""

    def __init__(self, path: Path, worker: SerialWorker, clock: Clock, intervals: Intervals) -> None:
        self._path = path
        self._worker = worker
        self._clock = clock
        self._intervals = intervals

    async def run(self, observe: Callable[[NodeRequest], None], report: Callable[[str, Reason | None], None]) -> None:
        """Read for ever. An unreadable file does not count as an absent one: its last configs stay in force.

        `observe` is called with the configs, `report` with the problem of the file, or None if it has none.
        """
        while True:
            problem: Reason | None = None
            try:
                text = await self._worker.run(self._read, name=f"read {self._path}", timeout_s=READ_TIMEOUT_S)
                observe(NodeRequest(configs=Observed(text)))
            except (OSError, UnicodeDecodeError, GpuvirtError) as error:
                problem = nodeproblems.config_invalid(
                    str(self._path),
                    "can't be read, so the previous vGPU configs stay in force",
                    "make it a readable file in UTF-8",
                    Seen("", str(error)),
                )
            report("config file", problem)
            await self._clock.sleep(self._intervals.config_file_s)

    def _read(self) -> ConfigText | None:
        try:
            return ConfigText(self._path.read_text(encoding="utf-8"), str(self._path))
        except FileNotFoundError:
            return None
