"""Measures what one watch event costs the controller, by the number of objects, and compares it with full copies.

python -m bench.watchevents
"""

from statistics import median
from time import process_time

from gpuvirt.clock import Signal
from gpuvirt.controller.store import Store
from gpuvirt.kube.cache import Cache, step
from gpuvirt.kube.kinds.core import Pod, PodSpec
from gpuvirt.kube.objects import PARTS, ObjectMap, key_of
from gpuvirt.kube.resources import Collection, Metadata, pods
from gpuvirt.kube.watchevents import EventType, Watched

SIZES = 50, 500, 5_000
EVENTS = 2_000
ROUNDS = 5


def pod(number: int, version: int) -> Pod:
    """Return a pod of an operand."""
    name = f"nvidia-device-plugin-daemonset-{number:05}"
    return Pod(Metadata(name, "gpuvirt", resource_version=str(version)), PodSpec(f"node{number % 500:03}"))


def pod_events(size: int) -> list[Watched[Pod]]:
    """Return events, one for each pod in turn."""
    return [Watched(EventType.MODIFIED, str(number), pod(number * 7 % size, number)) for number in range(1, EVENTS + 1)]


def us_an_event(size: int, parts: int) -> float:
    """Return the processor time of an event from cache to store; with one part, each event copies all objects."""
    store = Store(Collection(pods("gpuvirt"), Pod), Signal())
    listed = {key_of(listed_pod): listed_pod for listed_pod in (pod(number, 0) for number in range(size))}
    cache: Cache[Pod] = Cache(ObjectMap.of(listed, parts), "0")
    events, began_s = pod_events(size), process_time()
    for event in events:
        after = step(cache, (event,))
        cache = after.cache
        if after.delta is not None:
            store.observe(after.delta)
    return (process_time() - began_s) / EVENTS * 1e6


def main() -> None:
    """Print a line for each size."""
    for size in SIZES:
        rounds = [(us_an_event(size, 1), us_an_event(size, PARTS)) for _ in range(ROUNDS)]
        copies, now = median(copied for copied, _ in rounds), median(parted for _, parted in rounds)
        print(f"{size:>6,} pods: {copies:7.1f} us with copies of all, {now:6.1f} us now, ratio {now / copies:.2f}")


if __name__ == "__main__":
    main()
