"""The rotation of the webhook's certificate: each state has one next step, and no step leaves a gap."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from msgspec.structs import replace

from gpuvirt.controller.webhookcertificate.keeper import (
    OVERLAP,
    RENEW_BEFORE,
    SETTLE,
    VALID_DAYS,
    Certificate,
    Forget,
    Held,
    Issue,
    Pair,
    Promote,
    Step,
    Trust,
    next_step,
)

NAME = "webhook.ns.svc"
BEGIN = datetime(2030, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def issued(at: datetime, name: str = NAME) -> Pair:
    ends = at + timedelta(days=VALID_DAYS)
    return Pair(Certificate(f"{at} {name}".encode(), frozenset({name}), at, ends), b"key")


CURRENT, NEXT = issued(BEGIN), issued(BEGIN + timedelta(days=70))
OLD = CURRENT.certificate
DUE = OLD.ends - RENEW_BEFORE
TESTED = (
    ("nothing exists", Held(), None, BEGIN, Issue(follows=False)),
    ("a lost Secret", Held(), (OLD,), BEGIN, Issue(follows=False, previous=(OLD,))),
    ("another name", Held(issued(BEGIN, "x")), (), BEGIN, Issue(follows=False)),
    ("a certificate that has ended", Held(CURRENT), (OLD,), OLD.ends, Issue(follows=False)),
    ("a certificate that is not trusted", Held(CURRENT), (), BEGIN, Trust((OLD,))),
    ("what others have written", Held(CURRENT), (NEXT.certificate, OLD), DUE - MINUTE, Trust((OLD,))),
    ("all is done", Held(CURRENT), (OLD,), DUE - MINUTE, None),
    ("no configuration", Held(CURRENT), None, DUE - MINUTE, None),
    ("a renewal is due", Held(CURRENT), (OLD,), DUE, Issue(follows=True)),
    ("the next one is not trusted", Held(CURRENT, NEXT), (OLD,), NEXT.certificate.begins + SETTLE * 2,
     Trust((OLD, NEXT.certificate))),
    ("API servers may not have read it", Held(CURRENT, NEXT), (OLD, NEXT.certificate), NEXT.certificate.begins, None),
    ("it is trusted", Held(CURRENT, NEXT), (OLD, NEXT.certificate), NEXT.certificate.begins + SETTLE, Promote()),
    ("without a configuration", Held(CURRENT, NEXT), None, NEXT.certificate.begins + SETTLE, None),
    ("replicas may serve the old one", Held(NEXT, None, (OLD,)), (NEXT.certificate, OLD),
     NEXT.certificate.begins + OVERLAP - MINUTE, None),
    ("no replica serves the old one", Held(NEXT, None, (OLD,)), (NEXT.certificate, OLD),
     NEXT.certificate.begins + OVERLAP, Forget()),
)  # fmt: skip


@pytest.mark.parametrize(
    ("held", "trusted", "now", "step"), [row[1:] for row in TESTED], ids=[row[0] for row in TESTED]
)
def test_each_state_has_one_next_step(
    held: Held, trusted: tuple[Certificate, ...] | None, now: datetime, step: Step | None
) -> None:
    assert next_step(held, trusted, NAME, now) == step


@dataclass
class World:
    """The Secret, the configuration, an API server and a replica, which read them late."""

    now: datetime = BEGIN
    held: Held = field(default_factory=Held)
    trusted: tuple[Certificate, ...] = ()
    read_by_server: list[tuple[datetime, tuple[Certificate, ...]]] = field(default_factory=list)
    read_by_replica: list[tuple[datetime, Certificate]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def make(self, step: Step) -> None:
        self.steps.append(type(step).__name__)
        match step:
            case Issue(follows=True):
                self.held = replace(self.held, following=issued(self.now))
            case Issue():
                self.held = Held(issued(self.now), None, step.previous)
            case Trust():
                self.trusted = step.certificates
            case Promote():
                assert self.held.current is not None
                self.held = Held(self.held.following, None, (self.held.current.certificate, *self.held.previous))
            case Forget():
                self.held = replace(self.held, previous=())

    def observe(self) -> None:
        """Note a change of what the API server trusts, and of what the replica serves."""
        if not self.read_by_server or self.read_by_server[-1][1] != self.trusted:
            self.read_by_server.append((self.now, self.trusted))
        if self.held.current is None:
            return
        if not self.read_by_replica or self.read_by_replica[-1][1] != self.held.current.certificate:
            self.read_by_replica.append((self.now, self.held.current.certificate))

    def accepts(self, late: timedelta, later: timedelta) -> bool:
        """Return whether an API server that reads late trusts a replica that reads still later."""
        trusted = [found for at, found in self.read_by_server if at <= self.now - late]
        serves = [found for at, found in self.read_by_replica if at <= self.now - later]
        if not trusted or not serves:
            return True
        return serves[-1] in trusted[-1] and serves[-1].serves(NAME, self.now)


@pytest.mark.parametrize("seed", range(5))
def test_no_request_fails_while_certificates_are_renewed_and_controllers_end(seed: int) -> None:
    random = Random(seed)  # noqa: S311  it keeps no secrets
    world = World()
    while (step := next_step(world.held, world.trusted, NAME, world.now)) is not None:
        world.make(step)
    world.observe()
    while world.now < BEGIN + timedelta(days=2.2 * VALID_DAYS):
        # A controller ends after any step, and for up to some hours there is none.
        for _ in range(random.randint(1, 3)):
            step = next_step(world.held, world.trusted, NAME, world.now)
            if step is not None:
                world.make(step)
                world.observe()
        world.now += random.choice([MINUTE, 2 * MINUTE, timedelta(hours=random.randint(1, 6))])
        world.observe()
        for late, later in ((0, 0), (1, 0), (0, 3), (1, 3)):
            assert world.accepts(late * MINUTE, later * MINUTE), (world.now, world.steps[-6:])
    assert world.steps.count("Promote") >= 2
    assert world.steps.count("Issue") == world.steps.count("Promote") + 1
