"""The present lists of a host's device plugins, by the sockets on which the plugins listen.

A command reads these lists beside a device plugin of gpuvirt that it can't ask to drain devices.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import grpc

from gpuvirt.agent.kubelet import podresources, sockets, wire
from gpuvirt.errors import DamagedError, GpuvirtError
from gpuvirt.facts.ids import DeviceId

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
