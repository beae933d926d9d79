"""`gpuvirt extender`: the extender of the kube-scheduler that packs shares of GPUs."""

import asyncio
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from gpuvirt.cli.parameters import apiserver, options
from gpuvirt.cli.parameters.options import address_of
from gpuvirt.errors import ConfigError, InvalidIdError
from gpuvirt.extender.intervals import INTERVALS
from gpuvirt.extender.process import ExtenderOptions, ServiceOptions, run_until_stopped
from gpuvirt.facts.ids import parse_object_name
from gpuvirt.logs import LogFormat, set_up
from gpuvirt.model.shares.demand import WHOLE, Units
from gpuvirt.model.shares.placement import Policy
from gpuvirt.model.shares.sharedgpus import UNITS_RESOURCE
from gpuvirt.shares.sharing import Sharing
from gpuvirt.web.certificates import CertificateFiles, ClientRules

POD_IPS = "--pod-ips"
TLS = "--tls-cert, --tls-key"


class ClientCertificates(StrEnum):
    """Whether clients need certificates."""

    OPTIONAL = "optional"
    REQUIRED = "required"


Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        envvar="GPUVIRT_NAMESPACE",
        metavar="NAME",
        help="Namespace of the Lease and the Service. Default: the pod's, else that of the kubeconfig's context.",
    ),
]
Elect = Annotated[bool, typer.Option(help="Answer only while this process holds the Lease gpuvirt-extender.")]
Listen = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_LISTEN", metavar="ADDRESS:PORT", help="Address on which the extender serves kube-scheduler."
    ),
]
MetricsListen = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_METRICS_LISTEN", metavar="ADDRESS:PORT", help="Address of metrics and probes. Empty: none."
    ),
]
Service = Annotated[
    str,
    typer.Option(
        envvar="GPUVIRT_SERVICE",
        metavar="NAME",
        help="Service without a selector, whose EndpointSlice this process writes while it leads.",
    ),
]
PodIps = Annotated[
    str,
    typer.Option(
        POD_IPS,
        envvar="GPUVIRT_POD_IPS",
        metavar="ADDRESS,...",
        help="IP addresses of this process for --service. The slice gets the address of the Service's IP family.",
    ),
]
Resource = Annotated[
    str,
    typer.Option(envvar="GPUVIRT_RESOURCE", metavar="NAME", help="Name of the resource that stands for units of GPUs."),
]
UnitsOption = Annotated[
    int, typer.Option(envvar="GPUVIRT_UNITS", min=1, max=1_000_000, metavar="N", help="Units of a whole GPU.")
]
PolicyOption = Annotated[
    Policy,
    typer.Option(
        envvar="GPUVIRT_POLICY",
        help="binpack keeps whole GPUs free, spread shares each GPU with the fewest pods. The annotation"
        " gpuvirt.io/shares-policy of a pod takes precedence for that pod.",
    ),
]
PlaceTimeout = Annotated[
    int,
    typer.Option(
        envvar="GPUVIRT_PLACE_TIMEOUT",
        min=1,
        max=86_400,
        metavar="SECONDS",
        help="How long units are kept for a pod that kube-scheduler has placed and that waits to be bound: for its"
        " gang, volumes or claims.",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="GPUVIRT_TLS_CERT", metavar="FILE", help="Certificate for HTTPS; read again when it changes."),
]
TlsKey = Annotated[Path | None, typer.Option(envvar="GPUVIRT_TLS_KEY", metavar="FILE", help="Key of the certificate.")]
ClientCa = Annotated[
    Path | None,
    typer.Option(
        envvar="GPUVIRT_CLIENT_CA",
        metavar="FILE",
        help="CA that signs the clients' certificates; read again when it changes. Needs --tls-cert."
        " Without it, any client that reaches the address can bind pods that request units.",
    ),
]
ClientCerts = Annotated[
    ClientCertificates,
    typer.Option(
        envvar="GPUVIRT_CLIENT_CERTS",
        help="With --client-ca: required refuses clients without a permitted certificate; optional answers, counts"
        " and logs them.",
    ),
]
ClientName = Annotated[
    list[str] | None,
    typer.Option(
        envvar="GPUVIRT_CLIENT_NAMES",
        metavar="NAME",
        help="Permitted common name, DNS name or URI of a client's certificate; repeatable. Default: any.",
    ),
]


def extender(  # noqa: PLR0913  one parameter an option
    *,
    kubeconfig: apiserver.DemandedKubeConfigOption = None,
    context: apiserver.ContextOption = "",
    namespace: Namespace = "",
    elect: Elect = True,
    listen: Listen = ":8888",
    metrics_listen: MetricsListen = ":8889",
    service: Service = "",
    pod_ips: PodIps = "",
    resource: Resource = str(UNITS_RESOURCE),
    units: UnitsOption = int(WHOLE),
    policy: PolicyOption = Policy.BINPACK,
    place_timeout: PlaceTimeout = int(INTERVALS.place_s),
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    client_ca: ClientCa = None,
    client_certs: ClientCerts = ClientCertificates.REQUIRED,
    client_name: ClientName = None,
    log_format: options.LogFormatOption = LogFormat.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Run the scheduler extender, which places shares of GPUs.

    It answers filter, prioritize, preempt and bind of the kube-scheduler for pods that request units of GPUs, and runs
    until SIGTERM or SIGINT. One of several replicas answers, and the others stand by. While none answers, pods that
    request units stay pending; other pods are not affected.
    """
    set_up(log_format, verbose=verbose)
    credentials = apiserver.demanded_credentials(kubeconfig, context)
    address = address_of(listen)
    if address is None:
        raise ConfigError("no address; expected ADDRESS:PORT", where="--listen")
    served = ExtenderOptions(
        credentials=credentials,
        namespace=apiserver.own_namespace(namespace, credentials),
        listen=address,
        metrics_listen=address_of(metrics_listen, "--metrics-listen"),
        sharing=Sharing(options.resource_of(resource), Units(units), policy),
        elects=elect,
        intervals=replace(INTERVALS, place_s=float(place_timeout)),
        service=_service(service, pod_ips, elects=elect),
        tls=_tls(tls_cert, tls_key, _clients(client_ca, client_certs, client_name or [])),
    )
    asyncio.run(run_until_stopped(served))


def _service(name: str, addresses: str, *, elects: bool) -> ServiceOptions | None:
    if not name:
        return None
    if not elects:
        raise ConfigError("an extender without leader election writes no EndpointSlice", where="--service")
    found = tuple(filter(None, map(str.strip, addresses.split(","))))
    if not found:
        raise ConfigError("expected the addresses of this process, as in 10.0.0.7 or 10.0.0.7,fd00::7", where=POD_IPS)
    try:
        return ServiceOptions(parse_object_name(name), tuple(str(ip_address(address)) for address in found))
    except InvalidIdError as error:
        raise ConfigError(str(error), where="--service") from error
    except ValueError as error:
        raise ConfigError(f"{error}; expected addresses, as in 10.0.0.7,fd00::7", where=POD_IPS) from error


def _clients(authority: Path | None, certificates: ClientCertificates, names: list[str]) -> ClientRules | None:
    if authority is None:
        if names:
            raise ConfigError("expected the CA of the clients' certificates, too", where="--client-ca")
        return None
    return ClientRules(authority, frozenset(names), certificates is ClientCertificates.REQUIRED)


def _tls(certificate: Path | None, key: Path | None, clients: ClientRules | None) -> CertificateFiles | None:
    if certificate is None and key is None:
        if clients is not None:
            raise ConfigError("clients send certificates only with TLS; expected a certificate and its key", where=TLS)
        return None
    if certificate is None or key is None:
        raise ConfigError("expected both a certificate and its key", where=TLS)
    return CertificateFiles(certificate, key, clients)
