"""Compare the rights that roles grant to accounts with the requests of the accounts in an audit log.

Source: rbac.authorization.k8s.io/v1, audit.k8s.io/v1. A list or watch of one object by a field selector on its name is
logged with that name, as RBAC checks it. A patch that creates an object also needs `create`: its response is 201.
"""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from gpuvirt.plain import Plain

ACCOUNT = "ServiceAccount"
WHO = "system:serviceaccount:"


class Right(msgspec.Struct, frozen=True, order=True):
    """One verb upon one kind of objects, or one object of it."""

    account: str
    group: str
    resource: str
    """`nodes/status`."""
    verb: str
    name: str = ""
    """Empty: any."""
    namespace: str = ""
    """Empty: everywhere."""

    def permits(self, asked: "Asked") -> bool:
        same = (self.account, self.group, self.resource, self.verb)
        return (
            same == (asked.account, asked.group, asked.resource, asked.verb)
            and self.name in ("", asked.name)
            and self.namespace in ("", asked.namespace)
        )


class Asked(msgspec.Struct, frozen=True, order=True):
    """A request of an account."""

    account: str
    group: str
    resource: str
    """Empty where it was no object: `/version`."""
    verb: str
    name: str
    namespace: str
    code: int


class _Rule(msgspec.Struct, rename="camel"):
    verbs: list[str]
    api_groups: list[str] = []
    resources: list[str] = []
    resource_names: list[str] = []


class _Subject(msgspec.Struct):
    kind: str
    name: str


class _Reference(msgspec.Struct):
    kind: str
    name: str


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""


class _Object(msgspec.Struct, rename="camel"):
    """A role, a binding, or any other object."""

    kind: str
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    rules: list[_Rule] | None = None
    role_ref: _Reference | None = None
    subjects: list[_Subject] = []


class _User(msgspec.Struct):
    username: str


class _About(msgspec.Struct, rename="camel"):
    resource: str = ""
    subresource: str = ""
    api_group: str = ""
    name: str = ""
    namespace: str = ""


class _Response(msgspec.Struct):
    code: int = 0


class _Event(msgspec.Struct, rename="camel"):
    user: _User
    verb: str
    object_ref: _About = msgspec.field(default_factory=_About)
    response_status: _Response = msgspec.field(default_factory=_Response)


def rights_in(documents: Iterable[Plain]) -> frozenset[Right]:
    """Return the rights that the bindings and roles among manifests grant, one for each verb, kind and name."""
    found = [
        msgspec.convert(document, _Object) for document in documents if document is not None and _is_of_rbac(document)
    ]
    roles = {(role.kind, role.metadata.name): role.rules or [] for role in found if role.kind.endswith("Role")}
    return frozenset(
        replace(right, account=subject.name, namespace=binding.metadata.namespace)
        for binding in found
        if binding.role_ref is not None
        for subject in binding.subjects
        if subject.kind == ACCOUNT
        for rule in roles.get((binding.role_ref.kind, binding.role_ref.name), [])
        for right in _rights(rule)
    )


def asked_in(lines: Iterable[str]) -> frozenset[Asked]:
    """Return the requests in the events of an audit log."""
    return frozenset(asked for line in lines for asked in _asked(msgspec.json.decode(line, type=_Event)))


def unused(granted: Iterable[Right], asked: Iterable[Asked]) -> list[Right]:
    """Return the rights that no request used."""
    requests = list(asked)
    return sorted(right for right in granted if not any(right.permits(request) for request in requests))


def outside(granted: Iterable[Right], asked: Iterable[Asked]) -> list[Asked]:
    """Return requests that no right covers.

    A covered request may be refused all the same: during an install or uninstall, pods run a moment before or after
    their roles exist (seen with a controller that requested its lease).
    """
    rights = list(granted)
    return sorted(request for request in asked if not any(right.permits(request) for right in rights))


def _is_of_rbac(document: Plain) -> bool:
    return isinstance(document, dict) and str(document.get("apiVersion", "")).startswith("rbac.authorization.k8s.io/")


def _rights(rule: _Rule) -> Iterator[Right]:
    for group in rule.api_groups:
        for resource in rule.resources:
            for verb in rule.verbs:
                for name in rule.resource_names or [""]:
                    yield Right("", group, resource, verb, name)


def _asked(event: _Event) -> Iterator[Asked]:
    about, code = event.object_ref, event.response_status.code
    account = event.user.username.removeprefix(WHO).partition(":")[2]
    resource = f"{about.resource}/{about.subresource}" if about.subresource else about.resource
    asked = Asked(account, about.api_group, resource, event.verb, about.name, about.namespace, code)
    yield asked
    if (event.verb, code) == ("patch", 201):
        yield replace(asked, verb="create")
