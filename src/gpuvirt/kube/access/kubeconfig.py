"""Reads and merges kubeconfig files as kubectl does.

Of several files (`KUBECONFIG=a:b`), the first with a cluster, user or context of a name provides the whole entry, and
the first with a current context provides that. Missing files are skipped, unless all are missing. Paths are relative to
the file that has them. Source: client-go, tools/clientcmd.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from gpuvirt import documents
from gpuvirt.errors import ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Extension(msgspec.Struct, frozen=True):
    """The data of another program in a kubeconfig."""

    name: str = ""
    extension: object = None


class Cluster(msgspec.Struct, frozen=True, rename="kebab"):
    """The address and CA of an API server."""

    server: str = ""
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: tuple[Extension, ...] = ()


class EnvVar(msgspec.Struct, frozen=True):
    """An environment variable of a credential plugin."""

    name: str
    value: str = ""


class Exec(msgspec.Struct, frozen=True, rename="camel"):
    """A credential plugin."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    api_version: str = ""
    install_hint: str = ""
    provide_cluster_info: bool = False
    interactive_mode: str = ""


class AuthProvider(msgspec.Struct, frozen=True):
    """A login method that former versions of kubectl had."""

    name: str = ""


class User(msgspec.Struct, frozen=True, rename="kebab"):
    """The credentials of a user."""

    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    username: str = ""
    password: str = ""
    exec: Exec | None = None
    auth_provider: AuthProvider | None = None
    impersonate: str = msgspec.field(default="", name="as")
    impersonate_uid: str = msgspec.field(default="", name="as-uid")
    impersonate_groups: tuple[str, ...] = msgspec.field(default=(), name="as-groups")
    impersonate_extra: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict, name="as-user-extra")


class Context(msgspec.Struct, frozen=True):
    """A cluster, a user and a namespace."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(msgspec.Struct, frozen=True):
    name: str
    cluster: Cluster = Cluster()

    @property
    def content(self) -> Cluster:
        return self.cluster


class _NamedUser(msgspec.Struct, frozen=True):
    name: str
    user: User = User()

    @property
    def content(self) -> User:
        return self.user


class _NamedContext(msgspec.Struct, frozen=True):
    name: str
    context: Context = Context()

    @property
    def content(self) -> Context:
        return self.context


class KubeConfig(msgspec.Struct, frozen=True, rename="kebab"):
    """The content of a kubeconfig file."""

    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()
    current_context: str = ""


class _Named(Protocol[T_co]):
    @property
    def name(self) -> str: ...

    @property
    def content(self) -> T_co: ...


class NamedEntry(msgspec.Struct, Generic[T], frozen=True):
    """A cluster, user or context with its file and path."""

    content: T
    file: Path
    path: str
    """The path in the file: `$.users[0].user`."""

    def fault(self, message: str, key: str = "") -> ConfigError:
        """Return an error about the entry, or about one of its keys."""
        return ConfigError(message, where=str(self.file), path=f"{self.path}.{key}" if key else self.path)


class Merged(msgspec.Struct, frozen=True):
    """The merged entries of all files."""

    where: str
    clusters: Mapping[str, NamedEntry[Cluster]]
    users: Mapping[str, NamedEntry[User]]
    contexts: Mapping[str, NamedEntry[Context]]
    current_context: str


def read(paths: Path) -> Merged:
    """Return the entries of a kubeconfig, or of several that `paths` lists like KUBECONFIG; raise ConfigError."""
    files = _files(paths)
    configs = [(file, documents.load(file, KubeConfig, null_is_absent=True)) for file in files]
    return Merged(
        where=os.pathsep.join(str(file) for file in files),
        clusters=_merged("cluster", ((file, config.clusters) for file, config in configs)),
        users=_merged("user", ((file, config.users) for file, config in configs)),
        contexts=_merged("context", ((file, config.contexts) for file, config in configs)),
        current_context=next((config.current_context for _, config in configs if config.current_context), ""),
    )


def _files(paths: Path) -> Sequence[Path]:
    """Return the existing files of the list. A single file is returned even if it does not exist."""
    if paths.exists():
        return (paths,)
    listed = dict.fromkeys(Path(part) for part in str(paths).split(os.pathsep) if part)
    existing = [file for file in listed if file.exists()]
    if existing or len(listed) <= 1:
        return existing or (paths,)
    raise ConfigError("none of these files exists; expected a kubeconfig", where=str(paths))


def _merged(kind: str, files: Iterable[tuple[Path, Sequence[_Named[T]]]]) -> Mapping[str, NamedEntry[T]]:
    """Return entries by name, each from the first file that has it."""
    found: dict[str, NamedEntry[T]] = {}
    for file, entries in files:
        names = [entry.name for entry in entries]
        for index, entry in enumerate(entries):
            if entry.name in names[:index]:
                message = f"two entries have the name {entry.name!r}; expected one"
                raise ConfigError(message, where=str(file), path=f"$.{kind}s[{index}].name")
            found.setdefault(entry.name, NamedEntry(entry.content, file, f"$.{kind}s[{index}].{kind}"))
    return found
