"""The life of the whole agent, in virtual time."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from typing_extensions import override

from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import Life
from tests.agent.life.rigs import Rig, WholeAgent
from tests.thoroughness import examples


class AgentLife(Life):
    """The life with tasks, timers and files."""

    @override
    def make_rig(self, kernel: SimKernel) -> Rig:
        self.folder = TemporaryDirectory()
        return WholeAgent(kernel, Path(self.folder.name))

    @override
    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestAgent = AgentLife.TestCase
TestAgent.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
TestAgent.pytestmark = [pytest.mark.timeout(900)]  # type: ignore[attr-defined]  # a long life, and its shrinking
