"""Kubernetes' allocator of claims (`k8s.io/dynamic-resource-allocation/structured`), as a program that answers lines.

It is built in the Go module of the lab's programs: the version is that of the lab's kube-scheduler, with the gates that
are on by default.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from lab.cache import cache_root, digest, once, say
from lab.cluster import gomodule
from lab.cluster.golang import installed_go

SOURCE = Path(__file__).with_name("allocator.go")

Object = Mapping[str, object]


class Given(msgspec.Struct, frozen=True, rename="camel"):
    """The device, or the share of one, that a request of a claim got."""

    request: str
    device: str
    pool: str
    driver: str
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: Mapping[str, str] = msgspec.field(default_factory=dict)


class _Devices(msgspec.Struct, frozen=True):
    results: tuple[Given, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _Devices = _Devices()


class _Answer(msgspec.Struct, frozen=True):
    allocations: tuple[_Allocation, ...] | None = None
    error: str = ""


class Allocator:
    """The allocator, which knows the slices and classes of one node."""

    def __init__(self, questions: IO[str], answers: IO[str]) -> None:
        """Ask by these pipes."""
        self._questions, self._answers = questions, answers

    def allocate(self, claim: Object, held: Sequence[Given]) -> tuple[Given, ...] | None:
        """Return what a claim gets beside what others have; None where it does not fit. Raise ValueError."""
        question = {"allocated": msgspec.to_builtins(held), "claims": [claim]}
        self._questions.write(json.dumps(question) + "\n")
        self._questions.flush()
        answer = msgspec.json.decode(self._answers.readline(), type=_Answer)
        if answer.error:
            raise ValueError(answer.error)
        return answer.allocations[0].devices.results if answer.allocations else None


@contextmanager
def allocator(node: str, slices: Sequence[Object], classes: Sequence[Object]) -> Iterator[Allocator]:
    """Run the allocator for the slices of a node; raise BuildError where it can't be built."""
    with subprocess.Popen([str(program())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise ChildProcessError("the allocator has no pipes")
        process.stdin.write(json.dumps({"node": node, "slices": slices, "classes": classes}) + "\n")
        try:
            yield Allocator(process.stdin, process.stdout)
        finally:
            process.kill()


def program() -> Path:
    """Return the program, and build it where there is none; raise BuildError."""
    return once(_built(), _build) / "allocator"


def lacks() -> str | None:
    """Return why the program is missing and is not built automatically; None where it exists, or a Go that can.

    Where all tests must run (`CI=true`), Go is downloaded, too.
    """
    available = _built().exists() or installed_go() is not None or os.environ.get("CI") == "true"
    return None if available else "no Go that builds Kubernetes' allocator of claims"


def _built() -> Path:
    return cache_root() / f"allocator-{gomodule.KUBERNETES}-{digest(gomodule.RECIPE, SOURCE.read_text())}"


def _build(folder: Path) -> None:
    say("building Kubernetes' allocator of claims: half a minute beside the Kubernetes of the lab, once")
    gomodule.build(folder, str(SOURCE))
