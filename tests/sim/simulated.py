"""The type of the fixture that builds simulated hosts."""

from collections.abc import Callable

from gpuvirt_sim.kernel import SimKernel

Simulated = Callable[[str], SimKernel]
"""The fixture `simulated`, which builds the host of this name at each call."""
