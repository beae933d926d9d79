"""The scheduler: runs one strand of execution at a time, and asks a strategy for the next strand at each point.

A strand is a greenlet: the event loop of an agent, a job of one of its serial workers, a command. Actors and timers act
in the strand that is at a point, between two of its operations.
"""

import asyncio
import sys
from asyncio import events
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from greenlet import getcurrent, greenlet

from tests.explore.agenda import Agenda, Option, PossibleEvents
from tests.explore.reduction import ALL, KERNEL, STRANDS, Choice
from tests.explore.strategies import Strategy

MOST_STEPS = 20_000
"""A schedule with more steps counts as endless."""


class KilledError(BaseException):
    """The process of the strand was killed: the strand ends at its present operation."""


class EndlessError(Exception):
    """A schedule has no end."""


class DeadlockError(Exception):
    """Strands wait for each other, and no event can wake one of them."""


def _nothing() -> None:
    return


@dataclass(eq=False)
class Process:
    """A process; a kill ends all its strands."""

    name: str
    dead: bool = False


@dataclass(eq=False)
class Strand:
    """One line of execution of a process."""

    process: Process
    name: str
    body: Callable[[], None]
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that runs in the strand."""
    fiber: greenlet | None = None
    """The strand's greenlet; None until it runs for the first time."""
    until: Callable[[], bool] | None = None
    """The condition that the strand waits for."""
    unkillable: bool = False
    """The strand sleeps in the kernel without a way to interrupt it: a kill ends it only after the sleep."""
    picks: Callable[[], Sequence[Option]] | None = None
    """Returns the options to continue the strand; None: there is only one."""
    operations: int = 0
    """The number of its points and waits so far, without reads of files."""

    def __post_init__(self) -> None:
        self.way = Option(self.name, _nothing, self, goes_on=True)

    @property
    def ready(self) -> bool:
        """Whether the strand can continue."""
        return self.until is None or self.until()


class Scheduler:
    """Runs the strands of one schedule."""

    def __init__(
        self, strategy: Strategy, possible_events: Callable[[], PossibleEvents], *, traced: bool = False
    ) -> None:
        """`possible_events` returns the possible events of the kubelet, the clock and the actors."""
        self.strategy = strategy
        self.story: list[str] | None = [] if traced else None
        """The events of the schedule, step by step, if they are traced."""
        self.exploring = False
        """Whether strands pause at points; else only a waiting strand lets others continue."""
        self.failure: BaseException | None = None
        self.agenda = Agenda()
        self.choices: list[Choice] = []
        """The options of each step of the exploration, and the state that was touched after it."""
        self._possible_events = possible_events
        self._strands: list[Strand] = []
        self._main = Strand(Process("main"), "main", lambda: None, fiber=getcurrent())
        self._current = self._main
        self._reaper: Strand | None = None
        self._steps = 0
        self._at: dict[Strand | None, str] = {}
        """The next operation of each strand, for the story."""

    @property
    def current(self) -> Strand:
        """The running strand."""
        return self._current

    def add_line(self, what: str) -> None:
        """Add a line to the story of the schedule."""
        if self.story is not None:
            self.story.append(what)

    def touch(self, what: str) -> None:
        """Record that some state is read or changed before the next step."""
        if self.choices:
            self.choices[-1].touched.add(what)

    def spawn(self, strand: Strand) -> None:
        """Add a strand, which runs when it is chosen."""
        self.touch(STRANDS)
        self._strands.append(strand)

    def has_strands(self, process: Process) -> bool:
        """Return whether a process, dead or not, has strands that have not ended."""
        return any(strand.process is process for strand in self._strands)

    def run(self) -> None:
        """Run until no event is possible, or a failure was found."""
        if (chosen := self._next(self._main)) is not None:
            self._switch(chosen)
        if self.failure is not None:
            raise self.failure

    def point(self, what: str, *, is_read: bool = False) -> None:
        """Let other strands continue before the running strand does `what`."""
        me = self._current
        if me.process.dead:
            raise KilledError
        me.operations += not is_read
        if self.story is not None and me is not self._main:
            self._at[me] = what
        if self.exploring and me is not self._main:
            self._choose(me)

    def wait(self, until: Callable[[], bool], *, unkillable: bool = False) -> None:
        """Wait for a condition; other strands continue meanwhile."""
        me = self._current
        if me.process.dead:
            raise KilledError
        me.operations += 1
        if until():
            return
        me.until, me.unkillable = until, unkillable
        try:
            self._choose(me)
        finally:
            me.until, me.unkillable = None, False

    def kill(self, process: Process) -> None:
        """Kill a process: each of its strands stops at its present operation, and the kernel closes its files."""
        process.dead = True
        me, before = self._current, self._reaper
        for strand in [strand for strand in self._strands if strand.process is process and strand is not me]:
            if not strand.unkillable:
                self._reaper = me
                self._switch(strand)
        self._reaper = before

    def stop(self) -> None:
        """End everything, in the main strand."""
        self.exploring = False
        for process in {strand.process for strand in self._strands}:
            for strand in self._strands:
                strand.unkillable = False
            self.kill(process)

    def fail(self, failure: BaseException) -> None:
        """End the schedule with a failure."""
        if self.failure is None:
            self.failure = failure

    def _options(self, me: Strand) -> Sequence[Option]:
        mine = self._ways(me) if me in self._strands and me.ready else ()
        others = [way for strand in self._strands if strand is not me and strand.ready for way in self._ways(strand)]
        return self.agenda.options([*mine, *others], self._possible_events(), exploring=self.exploring)

    def _ways(self, strand: Strand) -> Sequence[Option]:
        return (strand.way,) if strand.picks is None else strand.picks()

    def _next(self, me: Strand) -> Strand | None:
        """Return the strand that continues; None if no event is possible, or a failure was found.

        The events between strands, those of actors and the clock, happen here.
        """
        while True:
            self._steps += 1
            if self._steps > MOST_STEPS:
                self.fail(EndlessError(f"{MOST_STEPS} steps, and no end"))
            options = self._options(me) if self.failure is None else []
            if not options:
                return None
            index = self._choose_from(options) if self.exploring else 0
            option = options[index]
            chosen = option.key if option.goes_on and isinstance(option.key, Strand) else None
            if chosen is None:
                self.touch(ALL)
            if self.story is not None and (chosen is not me or index):
                at = f": {self._at[chosen]}" if chosen in self._at else ""
                self.add_line(f"{'*' if index else ' '} {option.name}{at}")
            self.agenda.release(option)
            try:
                option.act()
            except Exception as error:  # noqa: BLE001  an actor has found a violation
                self.fail(error)
            if chosen is not None:
                return chosen
            if me.process.dead and not me.unkillable and me in self._strands:
                raise KilledError

    def _choose_from(self, options: Sequence[Option]) -> int:
        movable = tuple(
            (index, option.name, option.touches) for index, option in enumerate(options) if ALL not in option.touches
        )
        self.choices.append(Choice(movable))
        if any(strand.unkillable for strand in self._strands):
            self.touch(KERNEL)  # a change of the kernel may wake a strand
        return self.strategy.choose(len(options))

    def _choose(self, me: Strand) -> None:
        """Let other strands continue until `me` is chosen."""
        chosen = self._next(me)
        if chosen is not me:
            self._switch(chosen or self._main)
        if me.process.dead and not me.unkillable:
            raise KilledError

    def _switch(self, strand: Strand) -> None:
        """Continue a strand; return when the caller is chosen again."""
        me = self._current
        with _set_aside(me.loop):
            self._fiber_of(strand).switch()
        self._take_up(me)

    def _fiber_of(self, strand: Strand) -> greenlet:
        if strand.fiber is None:
            strand.fiber = greenlet(lambda *_: self._live(strand), parent=self._main.fiber)
        return strand.fiber

    def _take_up(self, strand: Strand) -> None:
        self._current = strand
        events._set_running_loop(strand.loop)

    def _live(self, strand: Strand) -> None:
        self._take_up(strand)
        try:
            strand.body()
        except KilledError:
            pass
        except BaseException as error:  # noqa: BLE001  it is the result of the schedule
            self.fail(error)
        self._strands.remove(strand)
        following = self._reaper or self._next(strand) or self._main
        getcurrent().parent = self._fiber_of(following)


@contextmanager
def _set_aside(loop: asyncio.AbstractEventLoop | None) -> Iterator[None]:
    """Let the thread run tasks of other loops for as long as the context lasts: since 3.12 it has one at a time."""
    if sys.version_info >= (3, 12) and loop is not None:
        task = asyncio.tasks._swap_current_task(loop, None)
        yield
        events._set_running_loop(loop)
        asyncio.tasks._swap_current_task(loop, task)
    else:
        yield
