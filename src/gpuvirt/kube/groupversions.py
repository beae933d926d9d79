"""The versions of API groups that an API server has, as it lists them."""

import msgspec

GROUPS_PATH = "/apis"


class GroupVersion(msgspec.Struct, frozen=True):
    """A version of an API group that the server has; the core group, without a name, is not among them."""

    group: str
    version: str


class ServedVersion(msgspec.Struct):
    """A version of a group, as the server lists it."""

    version: str


class ServedGroup(msgspec.Struct):
    """A group with its versions."""

    name: str
    versions: tuple[ServedVersion, ...] = ()


class Groups(msgspec.Struct):
    """The answer for `/apis`."""

    groups: tuple[ServedGroup, ...] = ()

    @property
    def all_versions(self) -> frozenset[GroupVersion]:
        """All groups in all their versions."""
        return frozenset(GroupVersion(group.name, of.version) for group in self.groups for of in group.versions)
