"""Secrets with certificates, as the controller reads and writes them (core/v1)."""

import msgspec

from gpuvirt.kube.kinds.manifests import OwnerReference
from gpuvirt.kube.resources import Metadata, Resource

TLS = "kubernetes.io/tls"
"""The type of a Secret with `tls.crt` and `tls.key`, which can't be changed."""


class SecretMetadata(Metadata, frozen=True, rename="camel", omit_defaults=True):
    """The metadata of a Secret with its owner: Kubernetes deletes the Secret after the owner."""

    owner_references: tuple[OwnerReference, ...] = ()


class Secret(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A Secret. JSON has the values in base64."""

    metadata: SecretMetadata
    data: dict[str, bytes] = {}
    type: str = TLS
    api_version: str = "v1"
    kind: str = "Secret"


def secrets(namespace: str) -> Resource:
    """Return the Secrets of a namespace."""
    return Resource("secrets", namespace=namespace)
