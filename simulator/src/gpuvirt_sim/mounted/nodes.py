"""The kinds of nodes below a mounted host's `/dev`."""

from enum import StrEnum


class Nodes(StrEnum):
    """Neither kind works as a device: that would need a driver in the real kernel."""

    NULL = "null"
    """Character devices that can be given to containers; each is `/dev/null`."""
    FILES = "files"
    """Files; a group's file can be opened once at a time, like a real group."""
