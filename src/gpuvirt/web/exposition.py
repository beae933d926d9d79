"""Pages for probes and metrics, and Prometheus' text format (exposition format 0.0.4) of the latter."""

from collections.abc import Callable, Iterable, Iterator

import msgspec

from gpuvirt.loops.histogram import Histogram

TEXT = "text/plain; charset=utf-8"


class PageAnswer(msgspec.Struct, frozen=True):
    """The response of a page."""

    status: int
    body: str
    content_type: str = TEXT


Page = Callable[[], PageAnswer]


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of a metric, by the values of its labels."""


def text_of(*metrics: Iterable[str]) -> str:
    """Return a page of metrics."""
    return "".join(f"{line}\n" for metric in metrics for line in metric)


def counter(name: str, text: str, labels: tuple[str, ...], values: Samples) -> Iterator[str]:
    """Yield the lines of a counter."""
    yield from head(name, text, "counter")
    yield from _samples(name, labels, values)


def gauge(name: str, text: str, labels: tuple[str, ...], values: Samples) -> Iterator[str]:
    """Yield the lines of a gauge."""
    yield from head(name, text, "gauge")
    yield from _samples(name, labels, values)


def histograms(
    name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Iterator[str]:
    """Yield the lines of a histogram of durations."""
    yield from head(name, text, "histogram")
    for key, histogram in values:
        pairs = _pairs(labels, key)
        within = f"{{{pairs}}}" if pairs else ""
        cumulative = 0
        for bound_s, count in zip(histogram.bounds_s, histogram.counts, strict=False):
            cumulative += count
            yield f'{name}_bucket{{{pairs}{"," if pairs else ""}le="{number(bound_s)}"}} {cumulative}'
        total = sum(histogram.counts)
        yield f'{name}_bucket{{{pairs}{"," if pairs else ""}le="+Inf"}} {total}'
        yield f"{name}_sum{within} {number(histogram.total_s)}"
        yield f"{name}_count{within} {total}"


def head(name: str, text: str, kind: str) -> Iterable[str]:
    """Return the HELP and TYPE lines of a metric."""
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _samples(name: str, labels: tuple[str, ...], values: Samples) -> Iterator[str]:
    for key, value in sorted(values):
        pairs = _pairs(labels, key)
        yield f"{name}{{{pairs}}} {number(value)}" if pairs else f"{name} {number(value)}"


def _pairs(labels: tuple[str, ...], key: tuple[str, ...]) -> str:
    return ",".join(f'{label}="{_escaped(text)}"' for label, text in zip(labels, key, strict=True))


def number(value: float) -> str:
    """Return a number with all its digits: a rounded counter would not grow, and its rate would be 0."""
    return str(int(value)) if float(value).is_integer() else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
