"""Configurations of admission webhooks, with the fields by which the API server trusts a webhook."""

import msgspec

from gpuvirt.kube.resources import Metadata, Resource

CONFIGURATIONS = Resource("mutatingwebhookconfigurations", "admissionregistration.k8s.io")


class ClientConfig(msgspec.Struct, frozen=True, rename="camel"):
    """How the API server connects to a webhook."""

    ca_bundle: bytes = b""
    """The authorities of the webhook's certificate, in PEM. JSON has it in base64."""


class Webhook(msgspec.Struct, frozen=True, rename="camel"):
    """A webhook of a configuration."""

    name: str = ""
    client_config: ClientConfig = ClientConfig()


class WebhookConfiguration(msgspec.Struct, frozen=True):
    """A MutatingWebhookConfiguration."""

    metadata: Metadata
    webhooks: tuple[Webhook, ...] = ()
