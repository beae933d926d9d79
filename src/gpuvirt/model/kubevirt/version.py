"""KubeVirt's version, as its status has it. One that is not a number (`devel`, a digest) is unknown: None."""

import re

Version = tuple[int, int, int, bool]
"""Major, minor, patch, and whether it is a release: a pre-release may lack what its release has."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(-.*)?")


def version_of(text: str | None) -> Version | None:
    """Return the version from `v1.8.0`, `0.58.2` or `v1.9.0-rc.2`; None for any other text."""
    found = _VERSION.fullmatch(text or "")
    return (int(found[1]), int(found[2]), int(found[3]), found[4] is None) if found is not None else None
