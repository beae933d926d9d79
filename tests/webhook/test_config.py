"""The webhook's config: what its defaults are, and messages that name the place, what was expected and found."""

import pytest

from gpuvirt.errors import ConfigError
from gpuvirt.webhook.injectionconfig import InjectionProfile, MdevRule, parse


def test_the_defaults_of_a_class_follow_from_its_profile() -> None:
    config = parse("version: v1\nclasses:\n  hot: {profile: hot-plug}\n  cold: {profile: cold-plug}\n", where="c")
    hot, cold = config.classes["hot"], config.classes["cold"]
    assert (hot.profile, hot.driver, hot.mdev) == (InjectionProfile.HOT_PLUG, "/opt/guest-driver", MdevRule.WARN)
    assert hot.nvidia is not None
    assert hot.gridd is not None
    assert (hot.containers.dev, hot.containers.driver) == (True, True)
    assert (cold.driver, cold.mdev, cold.nvidia, cold.gridd) == (None, MdevRule.REFUSE, None, None)
    assert (cold.containers.dev, cold.containers.driver) == (False, False)


def test_default_images_are_maintained_ones() -> None:
    hot = parse("version: v1\nclasses: {hot: {profile: hot-plug}}", where="c").classes["hot"]
    images = [part.image for part in (hot.nvidia, hot.gridd) if part is not None]
    assert images == ["docker.io/library/busybox:1.37.0-glibc", "docker.io/library/debian:12-slim"]


def test_a_part_without_an_image_is_left_out() -> None:
    hot = parse("version: v1\nclasses: {hot: {profile: hot-plug, gridd: {image: ''}}}", where="c").classes["hot"]
    assert hot.gridd is None
    assert hot.nvidia is not None


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        ("tencent.com/vgpu-492", True),
        ("tencent.com/vgpu-x", False),
        ("nvidia.com/NVIDIA_A10-4Q", True),
        ("nvidia.com/GRID_V100-4Q", True),
        ("nvidia.com/GA102GL_A10", False),
        ("nvidia.com/vgpu", False),
        ("nvidia.com/gpu", False),
    ],
)
def test_names_of_vgpu_types_are_recognized(resource: str, expected: bool) -> None:
    config = parse("version: v1\nclasses: {k: {profile: hot-plug}}", where="c")
    assert config.is_vgpu(resource) is expected


CLASS = "version: v1\nclasses:\n  kata:\n    profile: hot-plug\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "c.yaml:1: $.version: expected v1, found None; write `version: v1`"),
        ("version: v2", "c.yaml:1: $.version: expected v1, found 'v2'; write `version: v1`"),
        ("version: v1", "c.yaml:1: $.classes: has no RuntimeClass; add one, as in"),
        ("version: v1\nclass: {}", "c.yaml:2: $.class: no such key; expected one of: version, vgpuResources"),
        ("version: v1\nclasses: {kata: {}}", "c.yaml:2: $.classes.kata: lacks the key profile"),
        (
            "version: v1\nclasses: {kata: {profile: hot}}",
            'c.yaml:2: $.classes.kata.profile: expected one of: hot-plug, cold-plug; found text "hot"',
        ),
        (f"{CLASS}    drivr: /x", "c.yaml:5: $.classes.kata.drivr: no such key; expected one of: profile, driver"),
        (f"{CLASS}    driver: x", "c.yaml:5: $.classes.kata.driver: expected an absolute path on the node"),
        (f"{CLASS}    driver: /a/../b", "$.classes.kata.driver: expected an absolute path on the node"),
        (
            f"{CLASS}    driver: null\n    containers: {{driver: true}}",
            "$.classes.kata.containers.driver: expected false",
        ),
        (f"{CLASS}    licenceSecret: A_B", "$.classes.kata.licenceSecret: is not the name of a Secret"),
        (f"{CLASS}    mdev: never", "$.classes.kata.mdev: expected one of: allow, warn, refuse; found"),
        (
            f"{CLASS}    gridd: {{resources: {{limits: {{cpu: 1x}}}}}}",
            "c.yaml:5: $.classes.kata.gridd.resources.limits.cpu: expected a quantity, as in 100m or 128Mi, found '1x'",
        ),
        ("version: v1\nclasses: {A_B: {profile: hot-plug}}", "$.classes.A_B: is not the name of a RuntimeClass"),
        ("version: v1\nvgpuResources: ['*/x']", "c.yaml:2: $.vgpuResources[0]: expected DOMAIN/PATTERN"),
        ("version: v1\nmdevResources: [a]", "c.yaml:2: $.mdevResources[0]: expected DOMAIN/PATTERN"),
    ],
)
def test_an_invalid_config_is_reported_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, where="c.yaml")
    assert message in str(raised.value)
