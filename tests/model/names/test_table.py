"""Resource names as users' manifests have them, and names that Kubernetes refuses."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuvirt.facts.ids import PciId, ResourceName, VgpuType, parse_pci_id, parse_resource_name
from gpuvirt.facts.pci import NVIDIA, FunctionKind
from gpuvirt.model.inventory import naming, pciids
from gpuvirt.model.inventory.naming import Naming
from gpuvirt.model.inventory.pciids import PciIds

SHIPPED = Naming(PciIds((pciids.shipped(),)))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GK104GL [GRID K520]", "GK104GL_GRID_K520"),
        ("gk104gl [grid k520]", "GK104GL_GRID_K520"),
        ("gk104.gl [grid/k./520]", "GK104_GL_GRID_K__520"),
        ("GH100 [H100 PCIe]", "GH100_H100_PCIE"),
        ("TU104GL [Tesla T4]", "TU104GL_TESLA_T4"),
        ("GA100 [A100 SXM4 40GB]", "GA100_A100_SXM4_40GB"),
        ("GH100 [GH200 120GB / 480GB]", "GH100_GH200_120GB___480GB"),
        ("GA107GL [A2 / A16]", "GA107GL_A2___A16"),
        (
            "GA104M [GeForce RTX 3080 Mobile / Max-Q 8GB/16GB]",
            "GA104M_GEFORCE_RTX_3080_MOBILE___MAXQ_8GB_16GB",
        ),
        ("GA100 [A100-PG506-217]", "GA100_A100PG506217"),
        ("GB100 [HGX GB200]", "GB100_HGX_GB200"),
        ("GA104 High Definition Audio Controller", "GA104_HIGH_DEFINITION_AUDIO_CONTROLLER"),
        ("GA107 [RTX A1000 Embedded GPU ]", "GA107_RTX_A1000_EMBEDDED_GPU_"),
        ("TU106 [GeForce RTX 2060 Rev. A]", "TU106_GEFORCE_RTX_2060_REV__A"),
    ],
)
def test_the_name_of_a_text(text: str, name: str) -> None:
    assert naming.from_text(text) == name


@pytest.mark.parametrize(
    ("pci_id", "resource"),
    [
        ("10de:118a", "nvidia.com/GK104GL_GRID_K520"),
        ("10de:2331", "nvidia.com/GH100_H100_PCIE"),
        ("10de:1eb8", "nvidia.com/TU104GL_TESLA_T4"),
        ("10de:20b0", "nvidia.com/GA100_A100_SXM4_40GB"),
        ("10de:2342", "nvidia.com/GH100_GH200_120GB___480GB"),
        ("10de:25b6", "nvidia.com/GA107GL_A2___A16"),
        ("10de:20f2", "nvidia.com/GA100_A100PG506217"),
        ("10de:2941", "nvidia.com/GB100_HGX_GB200"),
        ("10de:228b", "nvidia.com/GA104_HIGH_DEFINITION_AUDIO_CONTROLLER"),
        ("10de:25f9", "nvidia.com/GA107_RTX_A1000_EMBEDDED_GPU"),
        ("10de:3182", "nvidia.com/3182"),
        ("10de:1f08", "nvidia.com/TU106_GEFORCE_RTX_2060_REV__A"),
        ("10de:2236", "nvidia.com/GA102GL_A10"),
        ("1002:74a1", "amd.com/AQUA_VANJARAM_INSTINCT_MI300X"),
        ("8086:56c0", "intel.com/ATSM_DATA_CENTER_GPU_FLEX_170"),
    ],
)
def test_the_resource_of_a_pci_id(pci_id: str, resource: str) -> None:
    assert SHIPPED.of_function(parse_pci_id(pci_id)).resource == resource


@pytest.mark.parametrize(
    ("vgpu_type", "resource"),
    [
        ("GRID T4-1Q", "nvidia.com/GRID_T4-1Q"),
        ("GRID P100X-1B", "nvidia.com/GRID_P100X-1B"),
        ("NVIDIA A10-12Q", "nvidia.com/NVIDIA_A10-12Q"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-48C", "nvidia.com/NVIDIA_RTX_Pro_6000_Blackwell_DC-48C"),
        ("\nGRID \t T4-1Q\n", "nvidia.com/GRID_T4-1Q"),
    ],
)
def test_the_resource_of_a_vgpu_type(vgpu_type: str, resource: str) -> None:
    assert SHIPPED.of_type(NVIDIA, VgpuType(vgpu_type)).resource == resource


@pytest.mark.parametrize(
    ("resource", "env"),
    [
        ("nvidia.com/GA102GL_A10", "PCI_RESOURCE_NVIDIA_COM_GA102GL_A10"),
        ("nvidia.com/GRID_T4-1Q", "PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q"),
        ("nvidia.com/2571", "PCI_RESOURCE_NVIDIA_COM_2571"),
        ("example.com/a.b", "PCI_RESOURCE_EXAMPLE_COM_A_B"),
    ],
)
def test_the_environment_variable_of_a_resource(resource: str, env: str) -> None:
    assert naming.env_name("PCI_RESOURCE", ResourceName(resource)) == env


def test_the_shipped_database_is_the_pinned_version() -> None:
    nvidia = [pci_id for pci_id in pciids.shipped() if pci_id.vendor == NVIDIA]
    names = Counter(SHIPPED.of_function(pci_id).resource for pci_id in nvidia)
    colliding = [count for count in names.values() if count > 1]
    assert (len(nvidia), len(colliding), sum(colliding)) == (1931, 230, 616)


def test_every_shipped_id_has_a_valid_resource_name() -> None:
    for pci_id in pciids.shipped():
        parse_resource_name(SHIPPED.of_function(pci_id).resource)


def test_a_name_that_is_too_long_is_shortened_to_a_stable_name() -> None:
    named = SHIPPED.of_function(parse_pci_id("10de:05be"))
    assert re.fullmatch(
        r"nvidia\.com/NF200_PCIE_2_0_SWITCH_FOR_QUADRO_PLEX_S4___TESLA_S870_[0-9A-F]{8}", named.resource
    )
    assert naming.legal("A" * 80) != naming.legal("A" * 79 + "B")
    assert naming.legal("A" * 80) == naming.legal("A" * 80)


@given(st.text(max_size=120))
def test_any_text_gives_a_legal_name_or_none(text: str) -> None:
    name = naming.legal(naming.from_text(text))
    if name is not None:
        assert parse_resource_name(f"nvidia.com/{name}")


@given(st.text(max_size=120))
def test_any_vgpu_type_gives_a_legal_resource(text: str) -> None:
    assert parse_resource_name(SHIPPED.of_type(NVIDIA, VgpuType(text)).resource)


@given(st.from_regex(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", fullmatch=True))
def test_a_legal_name_stays_as_it_is(name: str) -> None:
    assert naming.legal(name) == name


def test_a_configured_database_replaces_all_others() -> None:
    configured = Naming(PciIds((pciids.parse("10de  NVIDIA\n\t2236  My Own [A10]\n", where="mine"),)))
    assert configured.of_function(PciId(0x10DE, 0x2236)).resource == "nvidia.com/MY_OWN_A10"
    assert configured.of_function(PciId(0x10DE, 0x1EB8)).resource == "nvidia.com/1eb8"


def test_the_systems_database_names_only_unknown_ids() -> None:
    system = pciids.parse("10de  NVIDIA\n\t2236  Renamed\n\t3182  GB110 [B300]\n", where="system")
    both = Naming(PciIds((pciids.shipped(), system)))
    assert both.of_function(PciId(0x10DE, 0x2236)).resource == "nvidia.com/GA102GL_A10"
    assert both.of_function(PciId(0x10DE, 0x3182)).resource == "nvidia.com/GB110_B300"


def test_a_resource_keeps_its_first_name_and_has_its_new_name() -> None:
    later = Naming(SHIPPED.ids, first_names={"10de:2236": "2236"})
    named = later.of_function(PciId(0x10DE, 0x2236))
    assert (named.resource, named.natural) == ("nvidia.com/2236", "GA102GL_A10")


@pytest.mark.parametrize(("alias", "resource"), [("a10", "nvidia.com/a10"), ("example.com/gpu", "example.com/gpu")])
def test_an_alias_replaces_a_name(alias: str, resource: str) -> None:
    aliased = Naming(SHIPPED.ids, aliases={"GA102GL_A10": alias, "NVIDIA_A10-4Q": alias})
    assert aliased.of_function(PciId(0x10DE, 0x2236)).resource == resource
    assert aliased.of_type(NVIDIA, VgpuType("NVIDIA A10-4Q")).resource == resource


GB110, A10, RADEON = PciId(0x10DE, 0x3182), PciId(0x10DE, 0x2236), PciId(0x1002, 0x744C)


def test_one_name_for_all_gpus_counts_for_whole_gpus_of_nvidia() -> None:
    """As NVIDIA's device plugin for Kata names them; an alias of a single name takes precedence."""
    named = Naming(SHIPPED.ids, {"GA102GL_A10": "a10"}, kind_aliases={FunctionKind.GPU: "pgpu"})
    assert named.of_function(GB110, FunctionKind.GPU).resource == "nvidia.com/pgpu"
    assert named.of_function(A10, FunctionKind.GPU).resource == "nvidia.com/a10"
    for pci_id, kind, is_vf in (
        (GB110, FunctionKind.NVSWITCH, False),
        (GB110, FunctionKind.GPU, True),
        (RADEON, FunctionKind.GPU, False),
    ):
        found = named.of_function(pci_id, kind, is_vf=is_vf).resource
        assert found == SHIPPED.of_function(pci_id, kind, is_vf=is_vf).resource


@pytest.mark.parametrize(
    "name",
    ["GA102GL_A10", "/x", "nvidia.com/", "nvidia.com/_x", "nvidia.com/x_", "nvidia.com/a b", "a/b/c", "kubernetes.io/x",
     "x.kubernetes.io/y", "requests.nvidia.com/gpu", "NVIDIA.com/x", "nvidia.com/" + "x" * 64, "nvidia..com/x", ""],
)  # fmt: skip
def test_an_invalid_resource_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a resource name"):
        parse_resource_name(name)


@pytest.mark.parametrize("key", ["GA102GL_A10", "nvidia.com/GA102GL_A10", "OLD_NAME", "nvidia.com/OLD_NAME"])
def test_an_alias_applies_to_the_first_name_and_to_the_current_name(key: str) -> None:
    kept = Naming(SHIPPED.ids, aliases={key: "a10"}, first_names={"10de:2236": "OLD_NAME"})
    assert kept.of_function(PciId(0x10DE, 0x2236)).resource == "nvidia.com/a10"
