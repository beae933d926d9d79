"""Cases of pods with the config that they meet, and the expected results, which are files beside them."""

import sys
from pathlib import Path

import msgspec
import yaml

from gpuvirt import nulls
from gpuvirt.plain import Plain
from gpuvirt.webhook.admitting import Decision, admit
from gpuvirt.webhook.injectionconfig import InjectionConfig, parse
from gpuvirt.webhook.pod import Pod
from tests.webhook.jsonpatches import patched

FOLDER = Path(__file__).parent
CASES = sorted(path.stem for path in (FOLDER / "cases").glob("*.yaml"))


class Case(msgspec.Struct, frozen=True):
    """A pod, and the config of the webhook that admits it."""

    config: Plain
    pod: Plain

    @property
    def parsed(self) -> InjectionConfig:
        """The config."""
        return parse(yaml.safe_dump(self.config), where="config.yaml")


def decided(pod: Plain, config: InjectionConfig) -> Decision:
    """Return the decision about a pod."""
    return admit(nulls.decode(msgspec.json.encode(pod), Pod), config)


def admitted(pod: Plain, config: InjectionConfig) -> Plain:
    """Return the pod with what is added to it."""
    return patched(pod, decided(pod, config).operations)


def case(name: str) -> Case:
    """Return a case by its name."""
    return Case(**yaml.safe_load((FOLDER / f"cases/{name}.yaml").read_text()))


def result(name: str) -> str:
    """Return the result of a case, as its golden file has it."""
    given = case(name)
    found = decided(given.pod, given.parsed)
    if found.refusal is not None:
        return yaml.safe_dump({"refused": found.refusal.text}, width=120)
    shown: dict[str, Plain] = {"warnings": list(found.warnings)} if found.warnings else {}
    shown["pod"] = patched(given.pod, found.operations)
    return yaml.safe_dump(shown, sort_keys=False, width=120)


def golden(name: str) -> Path:
    """Return the golden file of a case."""
    return FOLDER / f"golden/{name}.yaml"


if __name__ == "__main__":
    # Writes the golden files again: python -m tests.webhook.goldens
    for name in CASES:
        golden(name).write_text(result(name))
    sys.exit(0)
