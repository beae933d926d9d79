"""A server's certificate, and who signed it, for tests that speak TLS."""

import pytest

from certificates import Authority, Pair


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Who signs servers' and clients' certificates."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def server(authority: Authority) -> Pair:
    """The certificate of a server on 127.0.0.1."""
    return authority.server("server", alternatives="IP:127.0.0.1")
