"""Connections to a kubeconfig's server: proxies, server names, unchecked certificates, impersonation."""

import asyncio
from pathlib import Path

import pytest

from gpuvirt.kube.access.kubecontext import from_kubeconfig
from gpuvirt.kube.client import Client
from gpuvirt.kube.failures import UnreachableError
from gpuvirt.kube.kinds.core import Node
from gpuvirt.kube.resources import NODES
from tests.kube.scriptedapi import Call, Reply, scripted
from tests.kube.testproxies import TestProxy, proxying
from tests.web.certificates import Authority, Pair

NODE: Reply = 200, {"metadata": {"name": "node01"}}


def client_of(folder: Path, port: int, cluster: str, user: str = "token: abc") -> Client:
    """Return a client by a kubeconfig; `cluster` follows the server."""
    (folder / "config").write_text(f"""
current-context: x
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{{cluster.replace("PORT", str(port))}}}}}]
users: [{{name: u, user: {{{user}}}}}]
""")
    return Client(from_kubeconfig(folder / "config"))


def here(authority: Authority, more: str = "") -> str:
    return f"server: 'https://127.0.0.1:PORT', certificate-authority: {authority.certificate}{more}"


def answer(_: Call) -> Reply:
    return NODE


async def get(client: Client) -> None:
    assert (await client.get(NODES, "node01", Node)).metadata.name == "node01"


@pytest.mark.parametrize("scheme", ["http", "https", "socks5", "socks5h"])
async def test_a_proxy_reaches_a_server_whose_name_only_the_proxy_resolves(
    tmp_path: Path, authority: Authority, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client checks the server's certificate through the proxy, and an HTTPS proxy's by the system's CAs."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    inside = authority.server("inside", alternatives="DNS:api.inside")
    cluster = f"server: 'https://api.inside:6443', certificate-authority: {authority.certificate}"
    outside = authority.server("outside", alternatives="IP:127.0.0.1")
    async with scripted(answer, inside, authority.certificate) as api:
        proxy = TestProxy(api.port)
        async with proxying(proxy, scheme, outside) as url:
            client = client_of(tmp_path, api.port, f"{cluster}, proxy-url: '{url}'")
            await get(client)
            await get(client)
    assert proxy.asked == ["api.inside:6443"]
    assert api.names == ["api.inside"]
    assert len(api.calls) == 2
    assert api.calls[0].headers["host"] == "api.inside:6443"


@pytest.mark.parametrize(("scheme", "login"), [("http", "Basic dXNlcjpwQHNz"), ("socks5", "user:p@ss")])
async def test_a_proxy_may_require_credentials(
    tmp_path: Path, authority: Authority, server: Pair, scheme: str, login: str
) -> None:
    async with scripted(answer, server, authority.certificate) as api:
        proxy = TestProxy(api.port, login)
        async with proxying(proxy, scheme, server) as url:
            for who in ("user:p%40ss", "user:other"):
                existing = url.replace("://", f"://{who}@")
                client = client_of(tmp_path, api.port, here(authority, f", proxy-url: '{existing}'"))
                if who == "user:p%40ss":
                    await get(client)
                    continue
                with pytest.raises(
                    UnreachableError,
                    match=rf"the proxy {url}: .*(407 As Said|password authentication failure)",
                ) as refused:
                    await get(client)
                assert "other" not in str(refused.value)
    assert proxy.logins[0] == login


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_a_proxy_that_closes_the_connection_is_reported(
    tmp_path: Path, authority: Authority, scheme: str
) -> None:
    closing = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with closing:
        url = f"{scheme}://127.0.0.1:{closing.sockets[0].getsockname()[1]}"
        with pytest.raises(UnreachableError, match=f"https://127.0.0.1:1: the proxy {url}: "):
            await get(client_of(tmp_path, 1, here(authority, f", proxy-url: '{url}'")))


@pytest.mark.parametrize(
    ("scheme", "refusal", "reported"), [("http", 503, "got 503 As Said"), ("socks5", 4, "Host unreachable")]
)
async def test_a_proxy_that_cannot_reach_the_server_is_reported(
    tmp_path: Path, authority: Authority, server: Pair, scheme: str, refusal: int, reported: str
) -> None:
    async with proxying(TestProxy(1, refusal=refusal), scheme, server) as url:
        with pytest.raises(UnreachableError, match=f"https://127.0.0.1:1: the proxy {url}: .*{reported}"):
            await get(client_of(tmp_path, 1, here(authority, f", proxy-url: '{url}'")))
    with pytest.raises(UnreachableError, match=f"the proxy {url} is unreachable: .*Connect call failed"):
        await get(client_of(tmp_path, 1, here(authority, f", proxy-url: '{url}'")))


async def test_a_tls_server_name_is_checked_against_the_certificate(tmp_path: Path, authority: Authority) -> None:
    other = authority.server("other", alternatives="DNS:api.other")
    async with scripted(answer, other, authority.certificate) as api:
        await get(client_of(tmp_path, api.port, here(authority, ", tls-server-name: api.other")))
        assert api.names == ["api.other"]
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(client_of(tmp_path, api.port, here(authority)))
        with pytest.raises(UnreachableError, match="Hostname mismatch"):
            await get(client_of(tmp_path, api.port, here(authority, ", tls-server-name: api.wrong")))


async def test_a_server_certificate_is_unchecked_only_with_insecure_skip_tls_verify(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    async with scripted(answer, server, authority.certificate) as api:
        cluster = "server: 'https://localhost:PORT'"
        await get(client_of(tmp_path, api.port, f"{cluster}, insecure-skip-tls-verify: true"))
        with pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(client_of(tmp_path, api.port, cluster))


async def test_certificates_and_tokens_in_files_are_sent_and_reloaded(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    jane, joe = authority.client("jane"), authority.client("joe")
    for pair, certificate, key in ((jane, "crt", "key"),):
        (tmp_path / certificate).write_bytes(pair.certificate.read_bytes())
        (tmp_path / key).write_bytes(pair.key.read_bytes())
    (tmp_path / "token").write_text("first\n")
    async with scripted(answer, server, authority.certificate) as api:
        user = "client-certificate: crt, client-key: key, tokenFile: token"
        client = client_of(tmp_path, api.port, here(authority), user)
        await get(client)
        (tmp_path / "crt").write_bytes(joe.certificate.read_bytes())
        (tmp_path / "key").write_bytes(joe.key.read_bytes())
        (tmp_path / "token").write_text("second\n")
        await get(client)
    seen = [(call.client, call.headers["authorization"]) for call in api.calls]
    assert seen == [("jane", "Bearer first"), ("joe", "Bearer second")]


async def test_impersonation_headers_are_sent_with_each_request(
    tmp_path: Path, authority: Authority, server: Pair
) -> None:
    user = "username: root, password: secret, as: jane, as-groups: [a, b], as-user-extra: {scopes: [view]}"
    async with scripted(answer, server, authority.certificate) as api:
        await get(client_of(tmp_path, api.port, here(authority), user))
    headers = api.calls[0].headers
    assert headers["authorization"] == "Basic cm9vdDpzZWNyZXQ="
    assert {name: text for name, text in headers.items() if name.startswith("impersonate")} == {
        "impersonate-user": "jane",
        "impersonate-group": "a,b",
        "impersonate-extra-scopes": "view",
    }
