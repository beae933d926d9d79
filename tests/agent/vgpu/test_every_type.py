"""Every type of every card of the catalog can be requested by name, is created, is observed and is removed."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuvirt.agent.change.changehost import ChangeHost
from gpuvirt.agent.change.observation import observe
from gpuvirt.facts.ids import PciAddress, VgpuType
from gpuvirt.facts.vgpu import Framework
from gpuvirt.hardware.scan import scan
from gpuvirt.model.change.desired import DesiredVgpus
from gpuvirt.model.change.vgpus.desiredvgpus import ConfigName, ConfigSet, config_gpus, resolve
from gpuvirt.model.desired.invalid import Origin, Source
from gpuvirt.model.vgputypes import catalog
from gpuvirt.model.vgputypes.catalog import Card, CardType
from gpuvirt_sim.builder import build_host
from gpuvirt_sim.devices.vgpu import VgpuTypeSpec
from gpuvirt_sim.hostspec import CardSpec, FunctionSpec, HostSpec, SlotSpec
from gpuvirt_sim.programs.tools import SimTools
from tests.agent.change.changes import NOBODY, change_host_in, change_vgpus, plan_vgpus
from tests.thoroughness import examples

GPU = PciAddress("0000:65:00.0")
EVERY = [(card, vgpu_type) for card in catalog.cards() for vgpu_type in card.types() if not vgpu_type.profile.is_mig]


def host_with(card: Card, framework: Framework) -> HostSpec:
    """Return a host with one such card, whose driver offers the types of the catalog."""
    types = tuple(
        VgpuTypeSpec(
            id=number,
            name=VgpuType(f"NVIDIA {vgpu_type.profile.text}"),
            size=f"{vgpu_type.profile.gb}G",
            most=vgpu_type.most,
        )
        for number, vgpu_type in enumerate(card.types(), 1)
        if not vgpu_type.profile.is_mig
    )
    ids = card.ids[0]
    function = FunctionSpec(
        id=str(ids.device),
        class_code="030200",
        subsystem=str(ids.subsystem) if ids.subsystem is not None else None,
        native_driver="nvidia",
    )
    on_vfs = framework is Framework.VENDOR_VFIO
    board = CardSpec(
        functions=(function,), vgpus=framework, vgpu_types=types, total_vfs=32 if on_vfs else None, vgpus_on_vfs=on_vfs
    )
    slot = SlotSpec(at=GPU, board="card", group=1, vfs=32 if on_vfs else 0)
    return HostSpec(about=card.product_name, slots=(slot,), boards={"card": board})


def apply_vgpus(change_host: ChangeHost, desired_vgpus: DesiredVgpus) -> list[str]:
    return [reason.text for reason in change_vgpus(change_host, GPU, desired_vgpus, NOBODY, lambda _: None)]


@given(st.sampled_from(EVERY), st.sampled_from([Framework.MDEV, Framework.VENDOR_VFIO]))
@settings(max_examples=examples(60), deadline=None)
def test_every_type_of_every_card_is_created_by_its_name_and_removed(
    asked: tuple[Card, CardType], framework: Framework
) -> None:
    card, desired_type = asked
    kernel = build_host(host_with(card, framework))
    with TemporaryDirectory() as folder:
        change_host = change_host_in(Path(folder), kernel, SimTools(kernel))
        seen = observe(change_host, NOBODY, None)
        board = seen.gpu_state(GPU)
        assert board is not None
        config = ConfigName(desired_type.profile.text, Source(Origin.SETTINGS, "settings"))
        desired_vgpus = resolve(config, ConfigSet(), config_gpus(seen.inventory, {GPU: board})).desired_by_gpu[GPU]
        if framework is Framework.VENDOR_VFIO and desired_type.most > 32:
            return  # the simulated card has no more VFs
        assert apply_vgpus(change_host, desired_vgpus) == []
        after = observe(change_host, NOBODY, None)
        live = Counter(str(vgpu.live.type) for vgpu in after.inventory.vgpus.values())
        assert live == {f"NVIDIA {desired_type.profile.text}": desired_type.most}
        assert plan_vgpus(after, GPU, desired_vgpus).met
        assert apply_vgpus(change_host, DesiredVgpus()) == []
        assert scan(kernel).vgpu_hosts[GPU].live == ()
