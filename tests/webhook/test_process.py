"""The webhook's process: answers over TLS, configs that change while it runs, and its end."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from gpuvirt.clock import RealClock
from gpuvirt.web.certificates import CertificateFiles
from gpuvirt.webhook.pages import MOST_BODY_BYTES
from gpuvirt.webhook.process import WebhookOptions, WebhookProcess
from tests.extender.httpclient import Connection, request
from tests.web.certificates import Authority
from tests.webhook.reviews import CONFIG, patch, pod, response, review

LOCAL = ("127.0.0.1", 0)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not met():
            await RealClock().sleep(0.01)


class Webhook:
    """A process, and a client of it that trusts its certificate."""

    def __init__(self, process: WebhookProcess, context: ssl.SSLContext | None, task: "asyncio.Task[None]") -> None:
        self.process = process
        self.context = context
        self.task = task

    @asynccontextmanager
    async def connected(self, *, probes: bool = False) -> AsyncIterator[Connection]:
        port = self.process.probes.port if probes else self.process.server.port
        assert port is not None
        context = None if probes else self.context
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        try:
            yield Connection(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def ask(self, body: bytes, path: str = "/mutate?timeout=5s", **headers: str) -> tuple[int, bytes]:
        async with self.connected() as connection:
            await connection.send(request(path, body, **headers))
            status, _, answer = await connection.answer()
        return status, answer

    async def page(self, path: str) -> tuple[int, str]:
        async with self.connected(probes=True) as connection:
            await connection.send(request(path, b"", method="GET"))
            status, _, body = await connection.answer()
        return status, body.decode()


@asynccontextmanager
async def running(
    folder: Path, config: str = CONFIG, *, tls: bool = False, drain_s: float = 0
) -> AsyncIterator[Webhook]:
    (folder / "config.yaml").write_text(config)
    files, context = None, None
    if tls:
        authority = Authority(folder)
        pair = authority.server("webhook", alternatives="IP:127.0.0.1")
        files = CertificateFiles(pair.certificate, pair.key)
        context = ssl.create_default_context(cafile=authority.certificate)
    process = WebhookProcess(WebhookOptions(folder / "config.yaml", LOCAL, LOCAL, files, drain_s=drain_s))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(process.run())
        await until(lambda: None not in (process.server.port, process.probes.port))
        yield Webhook(process, context, task)
        task.cancel()


async def test_pods_of_kata_with_a_vgpu_are_patched_over_tls(tmp_path: Path) -> None:
    async with running(tmp_path, tls=True) as webhook:
        status, answer = await webhook.ask(review(object=pod()))
        assert status == 200
        operations = patch(answer)
        assert isinstance(operations, list)
        assert len(operations) == 4
        for other in (pod("nvidia.com/gpu"), pod("nvidia.com/gpu", runtime_class="runc")):
            _, answer = await webhook.ask(review(object=other))
            assert response(answer) == {"uid": "u1", "allowed": True}
        _, answer = await webhook.ask(review(object=pod("nvidia.com/vgpu")))
        assert response(answer)["allowed"] is False
        assert "UnitsInKata: the pod requests nvidia.com/vgpu" in str(response(answer)["status"])
        assert await webhook.page("/readyz") == (200, "ok\n")
        assert await webhook.page("/healthz") == (200, "ok\n")
        lines = (await webhook.page("/metrics"))[1].splitlines()
        for line in (
            'gpuvirt_webhook_requests_total{result="patched",reason=""} 1',
            'gpuvirt_webhook_requests_total{result="unchanged",reason=""} 2',
            'gpuvirt_webhook_requests_total{result="refused",reason="UnitsInKata"} 1',
            "gpuvirt_webhook_request_seconds_count 4",
            "gpuvirt_webhook_config_valid 1",
        ):
            assert line in lines


async def test_a_webhook_without_a_valid_config_is_not_ready_and_refuses_with_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path, "version: v1\nclasses: {kata: {profile: x}}") as webhook:
        status, text = await webhook.page("/readyz")
        assert status == 503
        assert f"no valid config: {tmp_path}/config.yaml:2: $.classes.kata.profile: expected one of: hot-plug" in text
        _, answer = await webhook.ask(review(object=pod()))
        assert "WebhookNotConfigured: the webhook has no valid config yet" in str(response(answer)["status"])
        (tmp_path / "config.yaml").write_text(CONFIG)
        webhook.process.config.read_again()
        assert (await webhook.page("/readyz"))[0] == 200
        assert patch((await webhook.ask(review(object=pod())))[1])


async def test_an_invalid_change_keeps_the_last_valid_config_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as webhook:
        for text in ("version: v1\nclasses: []", None):
            caplog.clear()
            (tmp_path / "config.yaml").unlink()
            if text is not None:
                (tmp_path / "config.yaml").write_text(text)
            for _ in range(3):
                webhook.process.config.read_again()
            (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert line.startswith(f"the config is not valid; the last valid config is used: {tmp_path}/config.yaml")
            assert "gpuvirt_webhook_config_valid 0" in (await webhook.page("/metrics"))[1]
            assert (await webhook.page("/readyz"))[0] == 200
            assert patch((await webhook.ask(review(object=pod())))[1])
            (tmp_path / "config.yaml").touch()
        (tmp_path / "config.yaml").write_text(CONFIG.replace("hot-plug", "cold-plug"))
        webhook.process.config.read_again()
        _, answer = await webhook.ask(review(object=pod()))
        assert "MdevInKata" in str(response(answer)["status"])


@pytest.mark.parametrize(
    ("body", "path", "headers", "expected"),
    [
        (b"{}", "/", {}, (404, "no such page; the page is /mutate")),
        (b"{}", "/mutate", {"method": "GET"}, (405, "only POST")),
        (
            b"{}",
            "/mutate",
            {"Content_Type": "text/plain"},
            (415, "the content type is text/plain; expected"),
        ),
        (b"{}", "/mutate", {}, (400, "expected AdmissionReview of admission.k8s.io/v1")),
        (b"x", "/mutate", {}, (400, "cannot be parsed")),
        (b"", "/mutate", {"Content_Length": str(MOST_BODY_BYTES + 1)}, (413, "the body is larger than 8 MiB")),
    ],
)
async def test_what_is_no_review_gets_a_clear_answer(
    tmp_path: Path, body: bytes, path: str, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    async with running(tmp_path) as webhook:
        status, answer = await webhook.ask(body, path, **headers)
        assert (status, expected[1] in answer.decode()) == (expected[0], True), answer


async def test_a_process_that_ends_answers_until_the_service_leads_elsewhere(tmp_path: Path) -> None:
    async with running(tmp_path, drain_s=20) as webhook, webhook.connected() as kept:
        await kept.send(request("/mutate", review(object=pod())))
        assert (await kept.answer())[0] == 200
        webhook.task.cancel()
        await until(lambda: webhook.process.pages.ends)
        assert await webhook.page("/readyz") == (503, "the webhook is about to end\n")
        await kept.send(request("/mutate", review(object=pod())))
        status, headers, _ = await kept.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await kept.is_closed()
        webhook.task.cancel()
