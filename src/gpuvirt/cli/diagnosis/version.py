"""`gpuvirt version`: the version, as kubectl's users ask for it."""

from gpuvirt import __version__


def version() -> None:
    """Print the version."""
    print(f"gpuvirt {__version__}")
