"""The certificate's keeper beside an API server: what it writes, with real certificates, and what it leaves alone."""

import ssl
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from typing_extensions import override

from gpuvirt.clock import RealClock
from gpuvirt.controller.webhookcertificate import keeper
from gpuvirt.controller.webhookcertificate.keeper import (
    RENEW_BEFORE,
    VALID_DAYS,
    CertificateKeeper,
    CertificateNames,
    NotIssuedError,
    certificates_in,
    issue,
    pair_of,
)
from gpuvirt.facts.ids import parse_namespace, parse_object_name
from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from tests.extender.podapi import serving
from tests.kube.scriptedapi import CONFLICT, NOT_FOUND, Call, Reply

NAMES = CertificateNames(parse_namespace("ns"), parse_object_name("gpuvirt-webhook"))
SECRETS = "/api/v1/namespaces/ns/secrets"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/gpuvirt-webhook"
Object = dict[str, object]


class Later(RealClock):
    """A clock that can be set forward."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    @override
    def now(self) -> datetime:
        return super().now() + self.ahead


class Objects:
    """An API server with the webhook's Service, its Secret, and its configuration."""

    def __init__(self) -> None:
        self.data: dict[str, str] | None = None
        self.bundle = ""
        self.version = 1
        self.writes: list[str] = []
        self.refusals: list[Reply] = []
        self.has_configuration = True

    @property
    def trusted(self) -> bytes:
        return b64decode(self.bundle)

    def value(self, key: str) -> bytes:
        assert self.data is not None
        return b64decode(self.data[key])

    def _secret(self) -> Object:
        metadata = {"name": "gpuvirt-webhook-cert", "resourceVersion": str(self.version), "finalizers": ["x"]}
        return {"metadata": metadata, "data": self.data, "type": "kubernetes.io/tls"}

    def _configuration(self) -> Object:
        metadata = {"name": "gpuvirt-webhook", "resourceVersion": str(self.version)}
        webhooks = [{"name": "kata.gpuvirt.io", "clientConfig": {"caBundle": self.bundle or None}}]
        return {"metadata": metadata, "webhooks": webhooks}

    def answer(self, call: Call) -> Reply:
        if call.method != "GET" and self.refusals:
            return self.refusals.pop(0)
        match call.method, call.path:
            case "GET", path if path == f"{SECRETS}/gpuvirt-webhook-cert":
                return (200, self._secret()) if self.data is not None else NOT_FOUND
            case "GET", path if path == CONFIGURATION:
                return (200, self._configuration()) if self.has_configuration else NOT_FOUND
            case "GET", "/api/v1/namespaces/ns/services/gpuvirt-webhook":
                return 200, {"metadata": {"name": "gpuvirt-webhook", "uid": "u1"}}
            case "POST", path if path == SECRETS:
                return self._create(call)
            case "PATCH", path if path == f"{SECRETS}/gpuvirt-webhook-cert":
                return self._change(call)
            case "PATCH", path if path == CONFIGURATION:
                return self._trust(call)
        return NOT_FOUND

    def _create(self, call: Call) -> Reply:
        content = msgspec.json.decode(call.body)
        assert content["metadata"]["ownerReferences"][0]["uid"] == "u1"
        assert content["type"] == "kubernetes.io/tls"
        self.data = content["data"]
        self.writes.append("create")
        self.version += 1
        return 201, self._secret()

    def _change(self, call: Call) -> Reply:
        content = msgspec.json.decode(call.body)
        assert call.headers["content-type"] == "application/merge-patch+json"
        if content["metadata"]["resourceVersion"] != str(self.version):
            return CONFLICT
        assert self.data is not None
        merged = self.data | content["data"]
        self.data = {key: value for key, value in merged.items() if value is not None}
        self.writes.append(f"change {','.join(sorted(content['data']))}")
        self.version += 1
        return 200, self._secret()

    def _trust(self, call: Call) -> Reply:
        test, add = msgspec.json.decode(call.body)
        assert (test["op"], test["path"]) == ("test", "/metadata/resourceVersion")
        assert (add["op"], add["path"]) == ("add", "/webhooks/0/clientConfig/caBundle")
        self.bundle = add["value"]
        self.writes.append(f"trust {len(certificates_in(self.trusted))}")
        self.version += 1
        return 200, self._configuration()


@asynccontextmanager
async def keeping(objects: Objects, folder: Path) -> AsyncIterator[tuple[CertificateKeeper, Later]]:
    async with serving(objects.answer, folder) as served:
        client, clock = Client(from_kubeconfig(served.kubeconfig)), Later()
        try:
            yield CertificateKeeper(client, NAMES, clock), clock
        finally:
            client.close()


def served_by(objects: Objects, folder: Path) -> ssl.SSLContext:
    """Return the context of a server with the Secret's certificate."""
    for key in ("tls.crt", "tls.key"):
        (folder / key).write_bytes(objects.value(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def handshake(objects: Objects, folder: Path) -> None:
    """Connect to a server with the Secret's certificate, as the API server does; raise ssl.SSLError."""
    client = ssl.create_default_context(cadata=objects.trusted.decode())
    one, other = (ssl.MemoryBIO(), ssl.MemoryBIO()), (ssl.MemoryBIO(), ssl.MemoryBIO())
    asks = client.wrap_bio(one[0], one[1], server_hostname=NAMES.server)
    answers = served_by(objects, folder).wrap_bio(other[0], other[1], server_side=True)
    done = set[int]()
    for _ in range(10):
        for number, side in enumerate((asks, answers)):
            try:
                side.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
            other[0].write(one[1].read())
            one[0].write(other[1].read())
    assert done == {0, 1}


async def test_the_first_certificate_is_served_and_trusted(tmp_path: Path) -> None:
    objects = Objects()
    async with keeping(objects, tmp_path) as (keeper, clock):
        assert await keeper.check()
        assert objects.writes == ["create", "trust 1"]
        handshake(objects, tmp_path)
        assert objects.value("ca.crt") == objects.trusted
        assert await keeper.check()
        assert objects.writes == ["create", "trust 1"], "nothing more is due"
        assert keeper.ends_s is not None
        assert abs(keeper.ends_s - clock.now().timestamp() - VALID_DAYS * 86400) < 3600


async def test_a_renewal_trusts_both_and_then_the_new_one(tmp_path: Path) -> None:
    objects = Objects()
    async with keeping(objects, tmp_path) as (keeper, clock):
        assert await keeper.check()
        first = objects.trusted
        clock.ahead = timedelta(days=VALID_DAYS) - RENEW_BEFORE + timedelta(hours=1)
        assert await keeper.check()
        serve = "change ca.crt,next.crt,next.key,previous.crt,tls.crt,tls.key"
        # By the clock that was set forward, the new certificate is older than a day when it is issued.
        renewal = ["change next.crt,next.key", "trust 2", serve, "trust 2", "change previous.crt", "trust 1"]
        assert objects.writes[2:8] == renewal
        clock.ahead = timedelta()
        assert await keeper.check()
        assert first not in objects.trusted
        handshake(objects, tmp_path)


async def test_a_lost_secret_gets_a_new_certificate_and_the_old_one_stays_trusted(tmp_path: Path) -> None:
    objects = Objects()
    async with keeping(objects, tmp_path) as (keeper, _):
        assert await keeper.check()
        first = objects.trusted
        objects.data = None
        assert await keeper.check()
        assert first in objects.trusted
        assert len(certificates_in(objects.trusted)) == 2
        handshake(objects, tmp_path)


async def test_what_others_write_is_mended(tmp_path: Path) -> None:
    objects = Objects()
    async with keeping(objects, tmp_path) as (keeper, _):
        assert await keeper.check()
        assert objects.data is not None
        objects.bundle = b64encode(b"x").decode()
        objects.data["tls.key"] = b64encode(issue("x", 1).key).decode()
        objects.data["own"] = b64encode(b"kept").decode()
        assert await keeper.check()
        handshake(objects, tmp_path)
        assert objects.value("own") == b"kept"


async def test_a_refusal_or_conflict_is_reported_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects = Objects()
    forbidden: Reply = 403, {"kind": "Status", "message": "secrets is forbidden", "code": 403}
    objects.refusals = [CONFLICT, forbidden, forbidden]
    async with keeping(objects, tmp_path) as (keeper, _):
        found = [(await keeper.check(), "secrets is forbidden" in str(keeper.problem)) for _ in range(4)]
        assert found == [(False, False), (False, True), (False, True), (True, False)]
        assert len([record for record in caplog.records if "is not kept" in record.getMessage()]) == 1


async def test_without_a_configuration_there_is_a_certificate_and_no_error(tmp_path: Path) -> None:
    objects = Objects()
    objects.has_configuration = False
    async with keeping(objects, tmp_path) as (keeper, _):
        assert await keeper.check()
        assert objects.writes == ["create"]


def test_a_key_of_another_certificate_is_no_pair() -> None:
    one, other = issue("a.svc", 1), issue("b.svc", 1)
    assert pair_of(one.certificate.pem, one.key) == one
    assert pair_of(one.certificate.pem, other.key) is None
    assert pair_of(b"", b"") is None
    assert pair_of(b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----", one.key) is None
    assert one.certificate.names == {"a.svc"}


@pytest.mark.parametrize(
    ("program", "reported"),
    [
        (("no-such-program",), "can't be run: .*no-such-program"),
        ((sys.executable, "-c", "exit('it has no entropy')"), r"\(exit status 1\): it has no entropy$"),
        ((sys.executable, "-c", ""), r"\(exit status 0\): $"),
    ],
)
def test_a_child_that_signs_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...], reported: str
) -> None:
    monkeypatch.setattr(keeper, "SIGNING", program)
    with pytest.raises(NotIssuedError, match=reported):
        issue("a.svc", 1)


def test_the_child_alone_loads_the_library_that_signs() -> None:
    script = "import sys, gpuvirt.controller.process; print(*(name for name in sys.modules if 'cryptography' in name))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_long_name_is_no_common_name() -> None:
    name = f"gpuvirt-webhook.{'n' * 63}.svc"
    assert issue(name, 1).certificate.names == {name}
