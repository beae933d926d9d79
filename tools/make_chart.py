"""Generates what the chart shares with deploy/*.yaml, and the table of docs/values.md; --check reports stale files.

The rights of agents and operands are in deploy/*.yaml, kinds in their own manifests, and the descriptions of values
in values.yaml: each is written once, so that copies can't differ.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from chartvalues import table

from gpuvirt import __version__

Replacements = Sequence[tuple[str, str]]
"""Texts of a manifest, and those of the template in their place."""
ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart"
VALUES = ROOT / "docs/values.md"
KINDS = ("clusterpolicies.yaml", "gpunodes.yaml", "vgpuschedules.yaml")
CONTROLLERS = (
    "ConfigMap gpuvirt-node",
    "DaemonSet gpuvirt-node",
    "NetworkPolicy gpuvirt-node",
    "Role gpuvirt-node",
    "RoleBinding gpuvirt-node",
)
"""The objects of deploy/node.yaml that the controller creates from the ClusterPolicy."""
CHARTS = ("Namespace gpuvirt", "ServiceAccount gpuvirt-node", "ServiceAccount gpuvirt-discover")
"""The objects that helm creates, or that the chart has in a form of its own."""
POLICIES = "ValidatingAdmissionPolicy"
IN_A_RELEASE = (
    ("namespace: gpuvirt\n", "namespace: {{ .Release.Namespace }}\n"),
    ("namespace: gpuvirt}", "namespace: {{ .Release.Namespace }}}"),
    ("system:serviceaccount:gpuvirt:", "system:serviceaccount:{{ .Release.Namespace }}:"),
)
OF_THE_IMAGE = (
    (f"image: gpuvirt:{__version__}\n", 'image: {{ include "gpuvirt.image" . | quote }}\n'),
    ("imagePullPolicy: IfNotPresent\n", "imagePullPolicy: {{ .Values.image.pullPolicy }}\n"),
)
UID = "        runAsUser: 65532\n        runAsGroup: 65532\n"
# On OpenShift, the namespace sets the UID.
OF_THE_CLUSTER = ((UID, f'        {{{{- if not (include "gpuvirt.openshift" .) }}}}\n{UID}        {{{{- end }}}}\n'),)
OF_THE_DISCOVERER = (
    ("gpuvirt-discover", '{{ include "gpuvirt.name" . }}-discover'),
    (
        "      terminationGracePeriodSeconds: 5\n",
        (
            "      {{- with .Values.discover.priorityClassName }}\n      priorityClassName: {{ . }}\n      {{- end }}\n"
            "      terminationGracePeriodSeconds: 5\n"
        ),
    ),
    (
        "            requests: {cpu: 5m, memory: 40Mi}\n            limits: {memory: 128Mi}\n",
        "            {{- toYaml .Values.discover.resources | nindent 12 }}\n",
    ),
)
NAMED = re.compile(r"^metadata:\n  name: .*\n(?:  namespace: .*\n)?", re.MULTILINE)
LABELLED = re.compile(r"^( +)labels:\n", re.MULTILINE)
BEGIN, END = "<!-- values: generated -->\n", "<!-- values: end -->\n"


def documents(text: str) -> Iterator[tuple[str, str]]:
    """Yield each document of a manifest as text, with comments, after its kind and name."""
    for document in text.split("\n---\n"):
        lines = document.splitlines()
        found = (next(line for line in lines if line.startswith(field)) for field in ("kind: ", "  name: "))
        yield " ".join(line.split()[1] for line in found), document.strip("\n")


def template(name: str, leaves_out: Sequence[str], only_if: str = "", more: Replacements = ()) -> str:
    """Return a manifest of deploy/ as a template with `more` replacements; with `only_if`, if that condition is met."""
    begin, end = (f"{{{{- if {only_if} }}}}\n", "{{- end }}\n") if only_if else ("", "")
    parts = []
    for what, document in documents((DEPLOY / name).read_text()):
        if what in (*CHARTS, *leaves_out):
            continue
        text = f"---\n{document}\n"
        for found, put in (*IN_A_RELEASE, *OF_THE_IMAGE, *OF_THE_CLUSTER, *more):
            text = text.replace(found, put)
        text = with_common_labels(text)
        # Before 1.32, a token does not contain the node of its pod.
        guarded = '{{- if semverCompare ">=1.32.0-0" .Capabilities.KubeVersion.Version }}\n' + text + "{{- end }}\n"
        parts.append(guarded if what.startswith(POLICIES) else text)
    return "".join((begin, f"# Generated from deploy/{name} by `make generate`.\n", *parts, end))


def with_common_labels(document: str) -> str:
    """Return a document of a template with the labels that the values set for all objects, and for its pods."""
    if LABELLED.search(document):
        return LABELLED.sub(lambda found: f"{found[0]}{_common(len(found[1]) + 2)}", document)
    added = "  {{- with .Values.commonLabels }}\n  labels:\n    {{- toYaml . | nindent 4 }}\n  {{- end }}\n"
    return NAMED.sub(lambda found: f"{found[0]}{added}", document, count=1)


def _common(indent: int) -> str:
    at = " " * indent
    return f"{at}{{{{- with .Values.commonLabels }}}}\n{at}{{{{- toYaml . | nindent {indent} }}}}\n{at}{{{{- end }}}}\n"


def versioned() -> str:
    """Return Chart.yaml with the version of this tree."""
    lines = (CHART / "Chart.yaml").read_text().splitlines()
    fields = ("version: ", "appVersion: ")
    found = ((line, next(filter(line.startswith, fields), None)) for line in lines)
    return "".join(f"{line if field is None else field + __version__}\n" for line, field in found)


def documented() -> str:
    """Return docs/values.md with the current table of values."""
    text = VALUES.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table((CHART / "values.yaml").read_text()) + END + after


def generated() -> dict[Path, str]:
    """Return each generated file with its content."""
    kinds = {CHART / "files/crds" / name: (DEPLOY / name).read_text() for name in KINDS}
    return kinds | {
        CHART / "Chart.yaml": versioned(),
        CHART / "templates/agent-access.yaml": template("node.yaml", CONTROLLERS),
        CHART / "templates/shares-access.yaml": template("shares.yaml", (), ".Values.extender.enabled"),
        CHART / "templates/claims-access.yaml": template("claims.yaml", (), ".Values.dra.enabled"),
        CHART / "templates/operand-access.yaml": template("operands.yaml", ()),
        CHART / "templates/discover.yaml": template(
            "discover.yaml", (), 'include "gpuvirt.discovers" .', OF_THE_DISCOVERER
        ),
        VALUES: documented(),
    }


def main() -> int:
    """Generate the files, or compare them."""
    files = generated()
    if "--check" not in sys.argv[1:]:
        for file, text in files.items():
            file.write_text(text)
        return 0
    stale = [file for file, text in files.items() if not file.exists() or file.read_text() != text]
    for file in stale:
        print(f"{file.relative_to(ROOT)} is not up to date; run make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
