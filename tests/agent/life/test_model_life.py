"""The life of the agent's conclusions, with thousands of steps."""

import pytest
from hypothesis import settings
from typing_extensions import override

from gpuvirt_sim.kernel import SimKernel
from tests.agent.life.life import Life
from tests.agent.life.rigs import Conclusions, Rig
from tests.thoroughness import examples


class ConclusionsLife(Life):
    """The life without tasks or time."""

    @override
    def make_rig(self, kernel: SimKernel) -> Rig:
        return Conclusions(kernel)


TestConclusions = ConclusionsLife.TestCase
TestConclusions.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
TestConclusions.pytestmark = [pytest.mark.timeout(900)]  # type: ignore[attr-defined]  # a long life, and its shrinking
