"""The reflector's state machine: lists and watch events in any order."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.kube.cache import (
    MOST_PAUSE_S,
    SHORT_WATCH_S,
    WATCHES_A_LIST,
    Cache,
    Delta,
    Input,
    WatchEnded,
    WatchFailed,
    pause_s,
    step,
)
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.objects import ObjectKey
from gpuvirt.kube.resources import Metadata
from gpuvirt.kube.watchevents import Events, EventType, Listed, Watched

LONG_S = SHORT_WATCH_S + 1
NAMES = ("a", "b", "c")


def node(name: str, version: int, label: str = "x") -> Node:
    return Node(Metadata(name=name, resource_version=str(version), labels={"label": label}))


def key(name: str) -> ObjectKey:
    return ObjectKey("", name)


def known(cache: Cache[Node]) -> dict[ObjectKey, Node] | None:
    return dict(cache.objects) if cache.objects is not None else None


def after(*came: Input[Node], cache: Cache[Node] | None = None) -> tuple[Cache[Node], Sequence[Delta[Node]]]:
    """Return the cache after these inputs, and all deltas."""
    now: Cache[Node] = cache or Cache()
    delta = []
    for input_ in came:
        result = step(now, input_)
        now = result.cache
        delta += [result.delta] if result.delta is not None else []
    return now, delta


def modified(name: str, version: int, label: str = "x") -> Events[Node]:
    return (Watched(EventType.MODIFIED, str(version), node(name, version, label)),)


def deleted(name: str, version: int) -> Events[Node]:
    return (Watched(EventType.DELETED, str(version), node(name, version)),)


def bookmark(version: int) -> Events[Node]:
    return (Watched(EventType.BOOKMARK, str(version), None),)


def test_an_empty_list_is_a_delta_once() -> None:
    """An observed empty list differs from no observation."""
    cache, delta = after(Listed((), "5"), WatchEnded(LONG_S), WatchFailed(), Listed((), "9"))
    assert known(cache) == {}
    assert [dict(change.objects) for change in delta] == [{}]


def test_the_cache_is_unknown_until_a_complete_list() -> None:
    cache, delta = after(WatchFailed(), WatchFailed(expired=True), WatchFailed())
    assert (cache.objects, cache.version, delta) == (None, None, [])


def test_the_next_list_yields_changes_that_the_watch_missed() -> None:
    listed = Listed((node("a", 1), node("b", 2)), "5")
    cache, delta = after(listed, WatchFailed(expired=True), Listed((node("b", 7, "y"),), "9"))
    assert (set(delta[-1].changed), set(delta[-1].removed)) == ({key("b")}, {key("a")})
    assert known(cache) == {key("b"): node("b", 7, "y")}
    assert cache.version == "9"


def test_a_failed_watch_keeps_the_objects_and_resumes_at_its_version() -> None:
    before, _ = after(Listed((node("a", 1),), "5"), modified("a", 8))
    cache, delta = after(WatchFailed(), WatchFailed(), cache=before)
    assert (cache.objects, cache.version, delta) == (before.objects, "8", [])


def test_a_kind_that_reappears_is_reported_again_even_if_unchanged() -> None:
    """Listeners treat a missing kind as a kind without objects, and would continue with none."""
    listed = Listed((node("a", 1),), "5")
    cache, _ = after(listed, WatchFailed(missing=True))
    assert (known(cache), cache.version) == ({key("a"): node("a", 1)}, None)
    cache, delta = after(WatchFailed(), listed, WatchFailed(expired=True), listed, cache=cache)
    assert [dict(change.objects) for change in delta] == [known(cache)]


def test_a_bookmark_yields_no_delta_and_advances_the_version() -> None:
    cache, delta = after(Listed((), "5"), bookmark(90))
    assert (cache.version, len(delta)) == ("90", 1)


def test_an_event_that_is_delivered_twice_yields_a_delta_once() -> None:
    _, delta = after(Listed((node("a", 1),), "5"), modified("a", 8), modified("a", 8), deleted("b", 9))
    assert [change.changed for change in delta] == [{key("a")}, {key("a")}]


def test_a_server_restored_from_a_backup_is_listed_again() -> None:
    cache, _ = after(Listed((), "5"), *[WatchEnded(LONG_S)] * (WATCHES_A_LIST - 1))
    assert cache.version == "5"
    cache, _ = after(WatchEnded(LONG_S), cache=cache)
    assert cache.version is None


def test_backoff_grows_to_half_a_minute_and_resets_after_a_successful_watch() -> None:
    cache, _ = after(Listed((), "5"))
    assert pause_s(cache, 1.0) == 0.0
    pauses = []
    for _ in range(12):
        cache, _ = after(WatchFailed(), cache=cache)
        pauses.append(pause_s(cache, 1.0))
    assert pauses[:4] == [0.5, 1.0, 2.0, 4.0]
    assert pauses[-1] == MOST_PAUSE_S
    listed, _ = after(WatchFailed(expired=True), Listed((), "9"), cache=cache)
    assert pause_s(listed, 1.0) == 0.0, "a watch follows a list without a pause"
    mended, _ = after(bookmark(10), WatchFailed(), cache=listed)
    assert pause_s(mended, 1.0) == 0.5
    broken, _ = after(WatchFailed(after_s=LONG_S), cache=cache)
    assert pause_s(broken, 1.0) == 0.5


def test_backoff_grows_for_a_server_that_ends_each_watch() -> None:
    cache: Cache[Node] = Cache()
    pauses = []
    for _ in range(8):
        cache, _ = after(Listed((), "5"), WatchFailed(expired=True), cache=cache)
        pauses.append(pause_s(cache, 0.0))
    assert pauses == sorted(pauses)
    assert pauses[-1] == MOST_PAUSE_S / 2
    ended, _ = after(Listed((), "5"), *[WatchEnded(0.0)] * 3)
    assert pause_s(ended, 1.0) == 2.0


def test_agents_come_back_over_time_after_the_server_has_cut_their_watches() -> None:
    cut, _ = after(Listed((), "5"), WatchEnded(LONG_S, early=True))
    assert [pause_s(cut, chance, 5.0) for chance in (0.0, 0.5, 1.0)] == [0.0, 2.5, 5.0]
    assert pause_s(cut, 1.0) == 0.0, "a controller comes back at once"
    broken, _ = after(Listed((), "5"), WatchFailed(after_s=LONG_S), WatchFailed())
    assert pause_s(broken, 1.0, 5.0) == 5.0, "also while the server is away"
    for at_ease in (
        after(WatchEnded(LONG_S), cache=cut),
        after(bookmark(9), cache=broken),
        after(Listed((), "9"), cache=cut),
    ):
        assert pause_s(at_ease[0], 1.0, 5.0) == 0.0


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_backoff_is_within_its_bounds(chance: float, failures: int) -> None:
    cache: Cache[Node] = Cache(failures=max(failures, 1), failed=True)
    assert 0 < pause_s(cache, chance) <= MOST_PAUSE_S


class World:
    """The server's objects and the cache; a consumer applies changed and removed keys."""

    def __init__(self) -> None:
        self.truth: dict[ObjectKey, Node] = {}
        self.applied: dict[ObjectKey, Node] = {}
        self.cache: Cache[Node] = Cache()
        self.missed = False
        """Whether something has happened since the last list that no watch has reported."""
        self.version = 0

    def live(self, kind: str, name: str, *, seen: bool) -> None:
        self.version += 1
        if kind == "set":
            self.truth[key(name)] = node(name, self.version)
        elif self.truth.pop(key(name), None) is None:
            return
        if seen and self.cache.version is not None:
            self.take((modified if kind == "set" else deleted)(name, self.version))
        else:
            self.missed = True

    def list(self) -> None:
        self.take(Listed(tuple(self.truth.values()), str(self.version)))
        self.missed = False

    def take(self, came: Input[Node]) -> None:
        result = step(self.cache, came)
        assert self.cache.objects is None or result.cache.objects is not None, (
            "observed objects never become unknown again"
        )
        self.cache = result.cache
        if result.delta is not None:
            self.applied |= {key: result.delta.objects[key] for key in result.delta.changed}
            self.applied = {key: item for key, item in self.applied.items() if key not in result.delta.removed}
        assert self.applied == (self.cache.objects or {})


lives = st.tuples(st.sampled_from(["set", "delete"]), st.sampled_from(NAMES), st.booleans())
inputs = st.sampled_from(
    [
        WatchEnded(LONG_S),
        WatchEnded(0.0),
        WatchFailed(),
        WatchFailed(LONG_S),
        WatchFailed(expired=True),
        WatchFailed(missing=True),
    ]
)


@given(st.lists(lives | inputs | st.just("list") | st.just("bookmark"), max_size=60))
def test_the_cache_matches_the_server_after_any_sequence_of_events(
    events_between: Sequence[tuple[str, str, bool] | WatchEnded | WatchFailed | str],
) -> None:
    world = World()
    for event in events_between:
        match event:
            case (kind, name, seen):
                world.live(kind, name, seen=seen)
            case "list":
                world.list()
            case "bookmark":
                world.take(bookmark(world.version))
            case WatchEnded() | WatchFailed():
                world.take(event)
            case _:
                raise AssertionError(event)
        assert world.cache.objects is None or world.missed or known(world.cache) == world.truth
    world.list()
    assert known(world.cache) == world.applied == world.truth


watched = st.tuples(st.sampled_from(["set", "delete"]), st.sampled_from(NAMES), st.sampled_from("xy"))


@given(st.sets(st.sampled_from(NAMES)), st.lists(watched | st.just(None), max_size=20))
def test_events_together_lead_to_the_state_of_each_alone(
    listed: set[str], came: Sequence[tuple[str, str, str] | None]
) -> None:
    events: Events[Node] = ()
    for version, change in enumerate(came, 2):
        if change is None:
            events += bookmark(version)
        else:
            events += modified(change[1], version, change[2]) if change[0] == "set" else deleted(change[1], version)
    before, _ = after(Listed(tuple(node(name, 1) for name in listed), "1"))
    alone, _ = after(*((event,) for event in events), cache=before)
    together, deltas = after(events, cache=before)
    assert (known(together), together.version) == (known(alone), alone.version)
    old, new = known(before) or {}, known(together) or {}
    changed, removed = frozenset(key for key in new if old.get(key) != new[key]), frozenset(old.keys() - new.keys())
    expected = [(changed, removed)] if changed or removed else []
    assert [(delta.changed, delta.removed) for delta in deltas] == expected
