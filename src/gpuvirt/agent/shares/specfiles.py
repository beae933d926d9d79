"""The files of CDI specs: those of NVIDIA, which are read, and one for each container with a share."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gpuvirt.agent.store.files import replace_file
from gpuvirt.errors import DamagedError
from gpuvirt.model.shares.node import sharespec
from gpuvirt.model.shares.node.nvidiacdi import NvidiaSpec, parse

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 20
ENDINGS = frozenset({".json", ".yaml"})


class _Parsed(msgspec.Struct, frozen=True):
    """The spec in a file as it was read; a file that changes has another identity."""

    identity: tuple[int, int, int]
    spec: NvidiaSpec | None


class SpecFiles:
    """The folders of CDI specs."""

    def __init__(self, folder: Path, nvidia: Sequence[Path]) -> None:
        """`folder` is that of the shares' specs (`/run/cdi`).

        `nvidia` are the folders of NVIDIA's specs, with rising precedence (`/etc/cdi`, `/var/run/cdi`).
        """
        self.folder = folder
        self._nvidia = nvidia
        self._parsed: dict[Path, _Parsed] = {}

    def nvidia_specs(self) -> tuple[NvidiaSpec, ...]:
        """Return NVIDIA's specs; a file that can't be read or parsed is left out, as runtimes do."""
        before, self._parsed = self._parsed, {}
        for path in (path for folder in self._nvidia for path in _files_in(folder)):
            try:
                found = path.stat()
                identity = found.st_ino, found.st_mtime_ns, found.st_size
                known = before.get(path)
                self._parsed[path] = (
                    known if known is not None and known.identity == identity else _read(path, identity)
                )
            except OSError as error:
                log.warning("%s is left out: %s", path, error)  # unknown: no GPU is offered by it
        return tuple(parsed.spec for parsed in self._parsed.values() if parsed.spec is not None)

    def write(self, nonce: str, content: bytes) -> None:
        """Write the spec of a share: a temporary file that is renamed, because runtimes watch the folder."""
        replace_file(self.folder / sharespec.file_name(nonce), content, durable=False, mode=0o644)

    def contents(self) -> Iterator[bytes]:
        """Yield the specs of all shares."""
        for path in self._ours():
            with suppress(OSError):  # unknown: as a damaged spec (`recordstore`)
                yield path.read_bytes()

    def keep_only(self, devices: Collection[str]) -> None:
        """Remove the specs of shares that no container has any more."""
        for path in self._ours():
            nonce = sharespec.nonce_in(path.name)
            if nonce is None or sharespec.device_name(nonce) not in devices:
                path.unlink(missing_ok=True)

    def _ours(self) -> list[Path]:
        """Return our files, and temporary files that a killed agent has left behind."""
        left = self.folder.glob(f".{sharespec.PREFIX}*.new")  # unknown: a file that is not found is not removed
        # unknown: a file that is not found is not removed
        return sorted((*self.folder.glob(f"{sharespec.PREFIX}*{sharespec.SUFFIX}"), *left))


def _files_in(folder: Path) -> list[Path]:
    """Return the specs of other programs in a folder."""
    try:
        names = sorted(path for path in folder.iterdir() if path.suffix in ENDINGS)
    except OSError:
        return []  # unknown: no GPU is offered by them
    return [path for path in names if not path.name.startswith(sharespec.PREFIX)]


def _read(path: Path, identity: tuple[int, int, int]) -> _Parsed:
    with path.open("rb") as file:
        content = file.read(MOST_BYTES)
    try:
        return _Parsed(identity, parse(str(path), content))
    except DamagedError as error:
        log.warning("%s is left out: %s", path, error)
        return _Parsed(identity, None)  # unknown: no GPU is offered by it
