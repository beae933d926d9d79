"""How tests ask for a simulated host: by the name of its file."""

from collections.abc import Callable

from gpuvirt.sim.kernel import SimKernel

Simulated = Callable[[str], SimKernel]
"""The fixture `simulated`: it builds the host of a name again at each call."""
