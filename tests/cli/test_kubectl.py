"""`kubectl gpuvirt`: gpuvirt as a plugin of kubectl."""

import pytest

from gpuvirt import __version__
from tests.cli.kubectlplugin import called


def test_usage_says_what_was_typed() -> None:
    done = called("kubectl-gpuvirt", "why", "--help")
    assert "Usage: kubectl gpuvirt why" in done.stdout
    assert called("kubectl-gpuvirt", "version").stdout == f"gpuvirt {__version__}\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("v",), ["validate", "version", "vfio", "vgpu"]),
        (("vfio", "b"), ["bind"]),
        (("vgpu", "create", "0000:65:00.0", "T4-16"), ["T4-16A", "T4-16C", "T4-16Q"]),
        (("plan", "node/"), []),
    ],
)
def test_kubectl_completes_its_words(words: tuple[str, ...], found: list[str]) -> None:
    *lines, last = called("kubectl_complete-gpuvirt", *words).stdout.splitlines()
    assert sorted(line.partition("\t")[0] for line in lines) == found
    assert last == ":4"
