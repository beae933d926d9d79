"""Requests to the lab's API server from this process, because hundreds of kubectl calls would take too long."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.cluster.settings import ADMIN_TOKEN

TIMEOUT_S = 30.0
MERGE_PATCH = "application/merge-patch+json"


class ApiError(Exception):
    """The API server refused a request; the text has the request and the reason."""


@dataclass(frozen=True, slots=True)
class Api:
    """The API server, with the administrator's token."""

    certificate: Path
    address: str
    port: int

    def get(self, path: str) -> bytes | None:
        """Return an object or a list, None where it does not exist; raise ApiError or OSError."""
        return self._ask("GET", path)

    def patch(self, path: str, changes: Mapping[str, object]) -> None:
        """Change an object by a merge patch; raise ApiError or OSError."""
        self._ask("PATCH", path, json.dumps(changes))

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes | None:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": MERGE_PATCH}
        context = ssl.create_default_context(cafile=str(self.certificate))
        connection = http.client.HTTPSConnection(self.address, self.port, timeout=TIMEOUT_S, context=context)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status == http.HTTPStatus.NOT_FOUND and method == "GET":
            return None
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ApiError(f"{method} {path}: {answer.status}: {content.decode(errors='replace')[:2000]}")
        return content
