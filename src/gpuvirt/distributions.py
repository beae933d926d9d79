"""The parts of gpuvirt that other distributions bring by entry points; each is loaded when it is used."""

from types import ModuleType

from gpuvirt import __version__
from gpuvirt.errors import GpuvirtError

SIMULATOR, SCHEDULES = "gpuvirt-sim", "gpuvirt-schedules"
_FOLDERS = {SIMULATOR: "./schedules ./simulator", SCHEDULES: "./schedules"}


class MissingPartError(GpuvirtError):
    """A distribution is not installed, or in another version."""


def load_part(group: str, name: str, distribution: str) -> ModuleType:
    """Return the module that a distribution has under a name in a group of entry points; raises MissingPartError."""
    from importlib.metadata import entry_points  # noqa: PLC0415  the agent does without

    point = next(iter(entry_points(group=group, name=name)), None)
    found = point.dist.version if point is not None and point.dist is not None else None
    if point is None or found != __version__:
        state = "is not installed" if found is None else f"is installed in version {found}"
        raise MissingPartError(
            f"{name} needs {distribution} {__version__}, which {state}; in a clone of gpuvirt:"
            f" pip install {_FOLDERS[distribution]}; or pip install {distribution}=={__version__}"
        )
    module: ModuleType = point.load()
    return module
