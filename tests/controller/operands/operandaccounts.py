"""The accounts of the operands with NVIDIA's images, as an install creates them."""

from pathlib import Path

import yaml

from gpuvirt.plain import Plain

FILE = Path(__file__).parents[3] / "deploy/operands.yaml"


def access(namespace: str) -> str:
    """Return the manifest of the accounts and their rights, for operands in a namespace."""
    return FILE.read_text().replace("namespace: gpuvirt", f"namespace: {namespace}")


def objects(namespace: str) -> list[dict[str, Plain]]:
    """Return the objects of that manifest."""
    return list(yaml.safe_load_all(access(namespace)))


NAMES = tuple(
    document["metadata"]["name"]
    for document in yaml.safe_load_all(FILE.read_text())
    if document["kind"] == "ServiceAccount"
)
"""The names of the accounts."""
