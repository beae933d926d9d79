"""`gpuvirt webhook`: the admission webhook, which gives Kata pods with vGPUs and pods with units what these need."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gpuvirt.cli.parameters import options
from gpuvirt.cli.parameters.options import address_of
from gpuvirt.errors import ConfigError
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.web.certificates import CertificateFiles
from gpuvirt.webhook.process import WebhookOptions, run_until_stopped

TLS = "--tls-cert, --tls-key"


def webhook(  # noqa: PLR0913  one parameter an option
    *,
    config: Annotated[
        Path,
        typer.Option(
            envvar="GPUVIRT_WEBHOOK_CONFIG",
            metavar="FILE",
            help="YAML file with the RuntimeClasses of Kata and the parts that their pods get; read again when it"
            " changes.",
        ),
    ],
    listen: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_LISTEN", metavar="ADDRESS:PORT", help="Address on which the webhook serves the API server."
        ),
    ] = ":8443",
    metrics_listen: Annotated[
        str,
        typer.Option(
            envvar="GPUVIRT_METRICS_LISTEN", metavar="ADDRESS:PORT", help="Address of metrics and probes. Empty: none."
        ),
    ] = ":8444",
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="GPUVIRT_TLS_CERT",
            metavar="FILE",
            help="Certificate for HTTPS; read again when it changes. Without it, the webhook serves HTTP, which API"
            " servers do not use.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="GPUVIRT_TLS_KEY", metavar="FILE", help="Key of the certificate.")
    ] = None,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Run the admission webhook for Kata pods and pods with units.

    To pods that request a vGPU and have a RuntimeClass of its config, it adds the guest's driver, the licence daemon,
    and the mounts and variables that the containers need for them. Of pods with units, in namespaces that ask for it,
    it sets the scheduler. It runs until SIGTERM or SIGINT, and sends no requests to the API server. While no replica
    runs, the API server refuses these pods, and no others.
    """
    set_up(log_format, verbose=verbose)
    address = address_of(listen)
    if address is None:
        raise ConfigError("no address; expected ADDRESS:PORT", where="--listen")
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("expected both a certificate and its key", where=TLS)
    tls = CertificateFiles(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
    served = WebhookOptions(config, address, address_of(metrics_listen, "--metrics-listen"), tls)
    asyncio.run(run_until_stopped(served))
