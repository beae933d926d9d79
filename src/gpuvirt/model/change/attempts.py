"""The attempts at the change of one isolation unit: the time of the next one, and the result of the last one.

A change that was refused or has failed is tried again when the circumstances change, and after growing pauses. After
a rollback the host's observed state does not count as a circumstance: the failed attempt itself has changed it. The
pauses grow longer then, too.
"""

import hashlib

import msgspec
from msgspec.structs import replace

from gpuvirt.model.change.plan import Outcome
from gpuvirt.model.reasons import Reason

FIRST_PAUSE_S = 5.0
"""Each further pause is twice as long."""
MOST_PAUSE_S = 300.0
MOST_PAUSE_AFTER_ROLLBACK_S = 3600.0
"""Each of these attempts removes vGPUs and creates them again."""


class Circumstances(msgspec.Struct, frozen=True):
    """The inputs that decide the result of an attempt."""

    desired: object
    users: object = None
    """The processes and pods that use the devices. An attempt changes neither these nor the desired state."""
    observed: object = None
    """The state of the host. An attempt changes it, and restores it in a rollback."""


def fingerprint(circumstances: Circumstances) -> str:
    """Return a digest of circumstances, which other processes can compare."""
    return hashlib.sha256(msgspec.json.encode(circumstances, order="deterministic", enc_hook=repr)).hexdigest()


class Attempts(msgspec.Struct, frozen=True):
    """The attempts so far. Each method returns the state after an event."""

    tried_on: Circumstances | None = None
    """The circumstances of the last attempt."""
    rolled_back: bool = False
    """Whether the last attempt was rolled back. The host shows traces of its steps for a while."""
    pauses: int = 0
    """The number of pauses since the circumstances have changed."""
    again_at_s: float = 0.0
    """When the next attempt is due in the same circumstances, by the monotonic clock."""
    running: bool = False
    blocked_at: str | None = None
    """The step that the kernel blocks."""
    changed_on: int | None = None
    """The number of the host's observations when the last change ended: older observations are outdated."""
    outcome: Outcome | None = None
    """The outcome of the last attempt, or the reason why the next one waits; None for a unit in its desired state."""
    noted: tuple[Reason, ...] = ()
    """The reasons that are notes of the node. While a change runs, they are those from before it."""

    def is_due(self, circumstances: Circumstances, now_s: float) -> bool:
        """Return whether to try now: the circumstances have changed, or the pause is over."""
        return not self.running and (self._is_change(circumstances) or now_s >= self.again_at_s)

    def _is_change(self, circumstances: Circumstances) -> bool:
        before = self.tried_on
        if before is None or (circumstances.desired, circumstances.users) != (before.desired, before.users):
            return True
        return not self.rolled_back and circumstances.observed != before.observed

    def tried(self, circumstances: Circumstances) -> "Attempts":
        """Return the attempts with one in these circumstances; after a change of these the pauses begin again."""
        pauses = 0 if self._is_change(circumstances) else self.pauses
        return replace(self, tried_on=circumstances, pauses=pauses)

    def begun(self, circumstances: Circumstances) -> "Attempts":
        """Return the attempts with one that runs."""
        return replace(self.tried(circumstances), running=True, rolled_back=False)

    def resumed(self, circumstances: Circumstances, now_s: float) -> "Attempts":
        """Return the attempts after one of an earlier agent that has failed in the same circumstances."""
        return replace(self, tried_on=circumstances).paused(now_s)

    def ended(self, now_s: float) -> "Attempts":
        """Return the attempts after one that ran."""
        return replace(self, running=False).paused(now_s)

    def paused(self, now_s: float) -> "Attempts":
        """Return the attempts with a pause from now on."""
        most_s = MOST_PAUSE_AFTER_ROLLBACK_S if self.rolled_back else MOST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self.pauses, 20), most_s)
        return replace(self, again_at_s=now_s + pause_s, pauses=self.pauses + 1)

    def rolling_back(self) -> "Attempts":
        """Return the attempts after the last one has begun to roll back its steps."""
        return replace(self, rolled_back=True)

    def concluded(self, outcome: Outcome) -> "Attempts":
        """Return the attempts with a new outcome."""
        return replace(self, outcome=outcome, noted=outcome.reasons)

    def changed(self, observations: int, blocked_at: str | None) -> "Attempts":
        """Return the attempts after a change: observations of the host up to now are outdated."""
        return replace(self, changed_on=observations, blocked_at=blocked_at)

    def met(self, desired: object = None) -> "Attempts":
        """Return the attempts at a unit that is in its desired state, or has none; a running one goes on."""
        if self.running:
            return replace(self, outcome=None)
        return replace(self, outcome=None, noted=()).forgotten(desired)

    def forgotten(self, desired: object = None) -> "Attempts":
        """Return the attempts while none is due, so that any later circumstances count as a change.

        A rollback is remembered while the same state is `desired`: the host may have been observed half-way.
        """
        if self.rolled_back and self.tried_on is not None and self.tried_on.desired == desired:
            return self
        return replace(self, tried_on=None, rolled_back=False)
