"""Runtimes with and without CDI."""

import pytest

from gpuvirt.model.shares.node.nvidiacdi import ContainerRuntime, why_no_cdi


@pytest.mark.parametrize(
    ("version", "enabled", "has_cdi"),
    [
        ("containerd://2.1.3", None, True),
        ("containerd://2.1.3", False, False),
        ("containerd://2.4.2", False, True),
        ("containerd://v2.0.0-rc.1", None, True),
        ("containerd://1.7.24-0ubuntu0~22.04.1", None, False),
        ("containerd://1.7.24", True, True),
        ("containerd://1.7.1", True, False),
        ("containerd://1.6.36", True, False),
        ("cri-o://1.31.0", None, True),
        ("cri-o://1.20.0", None, False),
        ("docker://28.2.1", None, False),
        ("", True, False),
    ],
)
def test_cdi_of_runtimes(version: str, enabled: bool | None, has_cdi: bool) -> None:
    assert (why_no_cdi(ContainerRuntime(version, enabled)) is None) is has_cdi
