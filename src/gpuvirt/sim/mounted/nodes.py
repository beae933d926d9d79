"""What the nodes below a mounted machine's `/dev` are: for real, or for show."""

from enum import StrEnum


class Nodes(StrEnum):
    """Either, since a real one would need a driver of its own."""

    NULL = "null"
    """Character devices that can be given to containers; each is `/dev/null`."""
    FILES = "files"
    """Files; a group's can be opened once at a time, as a real one."""
