"""The error of a mount, for callers that must not load libfuse."""

from gpuvirt.errors import GpuvirtError


class MountError(GpuvirtError):
    """A simulated host cannot be mounted."""
