"""Mode shared: where it can be set, and which modes can be on one node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.errors import ConfigError
from gpuvirt.facts.ids import PciAddress
from gpuvirt.model.change.desired import DesiredDriver
from gpuvirt.model.change.driverplanning import driver_of
from gpuvirt.model.desired.gpumodes import DesiredMode, Modes
from gpuvirt.model.desired.observed import GpuNodeSpec, NodeRequest, Observed
from gpuvirt.model.desired.settings import Settings, ShareSettings, check
from gpuvirt.model.desired.workload import modes_of

GPU, OTHER = PciAddress("0000:65:00.0"), PciAddress("0000:ca:00.0")
SHARED = Modes(DesiredMode.SHARED)


def test_a_shared_gpu_needs_the_driver_of_containers() -> None:
    assert driver_of(DesiredMode.SHARED) is DesiredDriver.NATIVE


@pytest.mark.parametrize(
    ("settings", "request_"),
    [
        (Settings(mode=DesiredMode.SHARED), NodeRequest()),
        (Settings(workload_label=True), NodeRequest(workload=Observed("shared"))),
        (Settings(), NodeRequest(spec=Observed(GpuNodeSpec(mode="shared")))),
    ],
    ids=["settings", "label", "GpuNode"],
)
def test_settings_label_and_gpu_node_set_mode_shared(settings: Settings, request_: NodeRequest) -> None:
    assert modes_of(settings, request_, Modes(DesiredMode.PASSTHROUGH)) == (SHARED, None)


def test_single_gpus_of_a_node_can_be_shared() -> None:
    own = Settings(mode=DesiredMode.CONTAINER, modes={GPU: DesiredMode.SHARED})
    modes, invalid = modes_of(own, NodeRequest(), Modes())
    assert (modes.of(GPU), modes.of(OTHER), invalid) == (DesiredMode.SHARED, DesiredMode.CONTAINER, None)
    spec = GpuNodeSpec(mode="shared", gpus={OTHER: "passthrough"})
    modes, invalid = modes_of(Settings(), NodeRequest(spec=Observed(spec)), Modes())
    assert (modes.of(GPU), modes.of(OTHER), invalid) == (DesiredMode.SHARED, DesiredMode.PASSTHROUGH, None)


@given(
    default=st.sampled_from(DesiredMode),
    modes=st.dictionaries(st.sampled_from((GPU, OTHER)), st.sampled_from(DesiredMode)),
)
def test_vgpus_can_not_be_mixed_with_modes_for_containers(default: DesiredMode, modes: dict[str, DesiredMode]) -> None:
    everything = {default, *modes.values()}
    vgpus, containers = {DesiredMode.VGPU, DesiredMode.ON_DEMAND}, {DesiredMode.CONTAINER, DesiredMode.SHARED}
    mixed = bool(everything & vgpus and everything & containers)
    assert (Modes(default, modes).at_odds is not None) == mixed


@pytest.mark.parametrize("mode", [DesiredMode.CONTAINER, DesiredMode.SHARED])
def test_settings_that_mix_modes_are_refused_with_both_names(mode: DesiredMode) -> None:
    with pytest.raises(ConfigError, match=f"{mode} and vgpu can't be on one node") as raised:
        check(Settings(mode=mode, modes={GPU: DesiredMode.VGPU}), where="node.yaml")
    assert raised.value.path == f"$.modes.{GPU}"


def test_a_label_and_a_gpu_node_that_mix_modes_keep_the_modes() -> None:
    settings = Settings(workload_label=True, modes={GPU: DesiredMode.VGPU})
    modes, invalid = modes_of(settings, NodeRequest(workload=Observed("shared")), SHARED)
    assert modes is SHARED
    assert invalid is not None
    assert "both shared and vgpu" in invalid.expected
    spec = GpuNodeSpec(mode="shared", gpus={GPU: "vgpu"})
    modes, invalid = modes_of(Settings(), NodeRequest(spec=Observed(spec)), Modes())
    assert modes == Modes()
    assert invalid is not None
    assert "sets shared and vgpu" in invalid.reason.message


@pytest.mark.parametrize(
    ("shares", "path"),
    [
        (ShareSettings(resource="vgpu"), "$.shares.resource"),
        (ShareSettings(resource="kubernetes.io/vgpu"), "$.shares.resource"),
        (ShareSettings(resource="example.com/vgpu"), "$.shares.resource"),
        (ShareSettings(resource="nvidia.com/gpu"), "$.shares.resource"),
        (ShareSettings(resource="nvidia.com/gpu.part"), "$.shares.resource"),
        (ShareSettings(vgpu_type_labels=("vgpu.type", "a b")), "$.shares.vgpu_type_labels[1]"),
        (ShareSettings(vgpu_type_labels=("nvidia.com/gpu.workload.config",)), "$.shares.vgpu_type_labels[0]"),
        (ShareSettings(vgpu_type_labels=("node-role.kubernetes.io/master",)), "$.shares.vgpu_type_labels[0]"),
    ],
)
def test_invalid_settings_of_shares_are_refused_with_their_place(shares: ShareSettings, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(Settings(shares=shares), where="node.yaml")
    assert raised.value.path == path


def test_labels_of_an_admins_domain_are_accepted() -> None:
    shares = ShareSettings(vgpu_type_labels=("vgpu.type", "virtual.gpu.type", "example.com/vgpu-type"))
    assert check(Settings(shares=shares), where="node.yaml").shares is shares
