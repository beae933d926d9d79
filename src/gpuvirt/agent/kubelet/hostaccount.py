"""Reads once, for a command, the devices of pods from the kubelet, and the present lists of the host's device plugins.

A host has no kubelet where that is proved (`nokubelet`). Of a kubelet that does not run, its record is read. Of a
kubelet that runs, the record and the API must be read. A missing checkpoint is unknown, unless an agent has found in
this boot that no pod had a device before the kubelet writes it (`recordhistory`). In all other cases the allocations
are unknown.

A command reads the plugins' lists beside a device plugin of gpuvirt that it can't ask to drain devices.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import grpc

from gpuvirt.agent.known.nokubelet import Kubelets, running_text
from gpuvirt.agent.kubelet import podresources, sockets, wire
from gpuvirt.agent.kubelet.checkpoint import exists, with_answers, without_gone
from gpuvirt.agent.kubelet.podresources import PodResourcesUnknownError, ask_consumers
from gpuvirt.agent.kubelet.recordedallocations import CheckpointContent, RecordedAllocations
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.ids import DeviceId
from gpuvirt.model.allocation.allocations import Consumers

METHOD = "/v1beta1.DevicePlugin/ListAndWatch"
TIMEOUT_S = 5.0
NAMES = ("kubevirt-*.sock", "gpuvirt-*.sock")
"""The names of the sockets of gpuvirt's plugins, the first of which NVIDIA's plugin has, too."""


class ListUnknownError(GpuvirtError):
    """A listening plugin does not answer with its list."""


def read_lists(folder: Path) -> Mapping[Path, frozenset[DeviceId]]:
    """Return the healthy devices by socket; raise ListUnknownError. A socket without a listener lists nothing."""
    try:
        paths = sorted(path for path in folder.iterdir() if any(map(path.match, NAMES)))
    except OSError as error:
        raise ListUnknownError(f"{folder}: {error}") from error
    return {path: _read_list(path) for path in paths if _has_listener(path)}


def _has_listener(path: Path) -> bool:
    """Return whether a process listens; raise ListUnknownError where that is unknown: a path may be too long."""
    failure = sockets.connected(path)
    if failure in {errno.ECONNREFUSED, errno.ENOENT}:
        return False
    if failure is not None:
        raise ListUnknownError(f"{path}: {os.strerror(failure)}")
    return True


def _read_list(path: Path) -> frozenset[DeviceId]:
    with grpc.insecure_channel(f"unix:{path}", options=podresources.OPTIONS) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
        answers = call(b"", timeout=TIMEOUT_S)
        try:
            return wire.healthy_ids(next(iter(answers)))
        except StopIteration as error:
            raise ListUnknownError(f"{path}: the plugin has ended its list at once") from error
        except grpc.RpcError as error:
            raise ListUnknownError(f"{path}: {answers.code().name}: {answers.details()}") from error
        except DamagedError as error:
            raise ListUnknownError(f"{path}: {error}") from error
        finally:
            answers.cancel()


class AccountUnknownError(GpuvirtError):
    """The allocations of pods are not completely known; `known` are the allocations that are."""

    def __init__(self, seen: str, known: Consumers) -> None:
        super().__init__(seen)
        self.known = known


def read_account(recorded: RecordedAllocations, kubelets: Kubelets) -> Consumers | None:
    """Return the devices of pods, None on a host without a kubelet; raise AccountUnknownError.

    `kubelets` are the pids of the running kubelets.
    """
    paths = recorded.paths
    recorded.observe_kubelet(lambda: kubelets)
    look = recorded.look()
    if look.is_missing and not recorded.has_kubelet:
        return None
    in_api, unknown = _ask_api(paths.pod_resources_socket)
    recorded.observe_api(answered=in_api is not None)
    recorded.judge(look)
    listed = look.checkpoint.consumers if isinstance(look.checkpoint, CheckpointContent) else {}
    claims = dict(look.claims) if isinstance(look.claims, tuple) else {}
    in_file = {**recorded.lost(), **claims, **listed}
    known = {**without_gone(paths, in_file, in_api or {}), **with_answers(in_api or {}, in_file)}
    problems: list[str] = []
    if unknown is not None and kubelets != ():  # unknown: a kubelet may run
        problems.append(f"{running_text(kubelets)}; {unknown}")
    if (reason := recorded.why_unknown(look)) is not None:
        problems.append(reason.seen or reason.message)
    if problems:
        raise AccountUnknownError("; ".join(problems), known)
    return known


def _ask_api(socket: Path) -> tuple[Consumers | None, str | None]:
    """Return the allocations that the API lists, and the reason why it did not answer."""
    try:
        if exists(socket) is False:
            return None, f"no {socket}"
        return ask_consumers(socket), None
    except PodResourcesUnknownError as error:
        return None, str(error)


def answers(socket: Path) -> bool:
    """Return whether a kubelet answers at its socket, whatever the names of the processes say."""
    return _ask_api(socket)[0] is not None
