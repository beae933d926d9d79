"""No byte of an object that the controller applies changes unnoticed: the pods of a changed DaemonSet are replaced."""

from gpuvirt.controller.operands.inputs import OperandName
from gpuvirt.controller.operands.rendering import render
from tests.controller.operands.digests import RENDERINGS, differences, digests, recorded

IF_CHANGED = """
The controller renders these objects otherwise than tests/controller/operands/digests.json records.
`.venv/bin/python -m tests.controller.operands --show` prints all objects: compare its output with that of the tree
before the change. `make digests` records a change that is meant."""


def test_every_object_is_rendered_as_recorded() -> None:
    changed = list(differences(recorded(), digests()))
    assert not changed, "\n".join((*changed, IF_CHANGED))


def test_every_operand_is_rendered() -> None:
    found = {operand for policy, inputs in RENDERINGS.values() for operand in render(policy, inputs).operands}
    assert found == set(OperandName)


def test_each_difference_is_named() -> None:
    before = {"VMs": {"Role a": "1", "Role b": "2", "Role c": "3"}, "containers": {"Service s": "4"}}
    after = {"VMs": {"Role a": "1", "Role b": "5", "Role d": "6"}}
    assert list(differences(before, after)) == [
        "VMs: Role b differs",
        "VMs: Role c is gone",
        "VMs: Role d is new",
        "containers: Service s is gone",
    ]
    assert list(differences(after, after)) == []
