"""The targets of `gpuvirt why`, in kubectl's two forms."""

import pytest

from gpuvirt.diagnosis.target import joined_target, node_target, object_target
from gpuvirt.diagnosis.vms.vmevidence import ObjectKind
from gpuvirt.errors import ConfigError

KINDS = {"vm": ObjectKind.VM, "VirtualMachine": ObjectKind.VM, "vmi": ObjectKind.VMI, "pods": ObjectKind.POD}


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_name_the_same_object(kind: str) -> None:
    assert joined_target(kind, "one") == joined_target(f"{kind}/one", None)
    assert object_target(joined_target(kind, "one")) == (KINDS[kind], "one")


@pytest.mark.parametrize("kind", ["node", "nodes", "no", "Node"])
def test_both_forms_name_the_same_node(kind: str) -> None:
    assert node_target(joined_target(kind, "node01")) == "node01"
    assert node_target(joined_target(f"{kind}/node01", None)) == "node01"


@pytest.mark.parametrize("target", ["0000:65:00.0", "nvidia.com/GA102GL_A10", "GA102GL_A10", "intel.com/vm"])
def test_a_device_or_resource_is_itself(target: str) -> None:
    assert joined_target(target, None) == target
    assert object_target(target) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("vm", None), "'vm' lacks a name; expected vm/NAME, or vm NAME"),
        (("vm/", None), "'vm/' lacks a name; expected vm/NAME"),
        (("vm/a", "b"), "'vm/a' has a name already; expected vm/a, or vm b"),
        (("pdo", "a"), "'pdo' is not a kind that why explains; did you mean pod/a?"),
        (("nod/a", None), "'nod' is not a kind that why explains; did you mean node/a?"),
        (("deployment", "a"), "'deployment' is not a kind that why explains; expected vm, vmi, pod, claim, node"),
        (("0000:65:00.0", "a"), "is not a kind"),
    ],
)
def test_ambiguous_words_are_refused(words: tuple[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        joined_target(*words)
    assert message in str(caught.value)
