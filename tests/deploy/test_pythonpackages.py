"""The distributions of an image are read from its files; it is expected to have those that gpuvirt requires."""

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.deploy.pythonpackages import EXTRAS, Packages, expected_distributions, normalized, packages_of

ROOT = Path(__file__).parent.parent.parent
FOLDER = "usr/local/lib/python3.13/dist-packages"
INSTALLED = {
    f"{FOLDER}/Some_Package-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: Some_Package\nVersion: 1.0\n",
    f"{FOLDER}/Some_Package-1.0.dist-info/RECORD": (
        b"some/__init__.py,sha256=x,1\nsome.py,,\n../../../bin/some,,\n"
        b"Some_Package-1.0.dist-info/METADATA,,\nSome_Package-1.0.dist-info/RECORD,,\n"
    ),
    f"{FOLDER}/some/__init__.py": b"",
    f"{FOLDER}/some/__pycache__/__init__.cpython-313.pyc": b"",
    f"{FOLDER}/some/.wh..wh..opq": b"",
    f"{FOLDER}/some.py": b"",
    f"{FOLDER}/__pycache__/some.cpython-313.pyc": b"",
    "usr/lib/python3.13/ast.py": b"",
    "usr/bin/python3": b"",
}


def packages(*distributions: str, strays: tuple[str, ...] = ()) -> Packages:
    return Packages(frozenset(distributions), frozenset(strays))


def test_a_distribution_has_the_files_of_its_record() -> None:
    assert packages_of(INSTALLED) == packages("some-package")


def test_a_further_distribution_is_noticed() -> None:
    metadata = {"usr/lib/python3/dist-packages/other-2.dist-info/METADATA": b"Name: other\n"}
    record = {"usr/lib/python3/dist-packages/other-2.dist-info/RECORD": b"other-2.dist-info/METADATA,,\n"}
    assert packages_of(INSTALLED | metadata).distributions == {"some-package", "other"}
    assert packages_of(INSTALLED | metadata | record).strays == {
        "usr/lib/python3/dist-packages/other-2.dist-info",
    }, "a RECORD lists itself"


def test_files_of_no_distribution_are_noticed_in_a_package_of_one_too() -> None:
    assert packages_of(INSTALLED | {f"{FOLDER}/gpuvirt_sim/kernel.py": b"", f"{FOLDER}/sources.pth": b""}) == packages(
        "some-package", strays=(f"{FOLDER}/gpuvirt_sim", f"{FOLDER}/sources.pth")
    )
    assert packages_of(INSTALLED | {f"{FOLDER}/some/added.py": b""}).strays == {f"{FOLDER}/some"}
    elsewhere = "opt/lib/python3.13/site-packages"
    assert packages_of(INSTALLED | {f"{elsewhere}/some.py": b""}).strays == {f"{elsewhere}/some.py"}


def test_the_image_is_expected_to_have_what_gpuvirt_requires_and_nothing_else() -> None:
    assert expected_distributions(ROOT) == required("gpuvirt-schedules", EXTRAS)


def test_the_dockerfile_installs_these_extras() -> None:
    installed = re.findall(r'"gpuvirt-schedules\[(.*?)\] @', (ROOT / "Dockerfile").read_text())
    assert installed == [",".join(EXTRAS)]


def required(name: str, extras: tuple[str, ...] = ()) -> frozenset[str]:
    """Return a distribution and all that it requires, by what is installed here."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:  # libvirt-python, which a computer without libvirt lacks
        lines = []
    found = frozenset({normalized(name)})
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            found |= required(requirement.name, tuple(requirement.extras))
    return found
