{{/* Labels, and the image; objects have one name each, since a cluster has one gpuvirt. */}}

{{/* Labels of an object: (list $ "controller"). */}}
{{- define "gpuvirt.labels" -}}
{{- $root := first . -}}
{{ include "gpuvirt.selector" . }}
app.kubernetes.io/part-of: gpuvirt
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What selects the pods of a component. */}}
{{- define "gpuvirt.selector" -}}
app.kubernetes.io/name: gpuvirt
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* An image from its parts: a dict with repository and tag. */}}
{{- define "gpuvirt.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{ .Values.image.repository }}{{ hasPrefix "sha256:" $tag | ternary "@" ":" }}{{ $tag }}
{{- end }}

{{/* Secrets by which images are pulled, as pods and service accounts have them. */}}
{{- define "gpuvirt.pullSecrets" -}}
{{- range .Values.image.pullSecrets }}
- name: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Whether `gpuvirt discover` runs: "true", or nothing. */}}
{{- define "gpuvirt.discovers" -}}
{{- if kindIs "invalid" .Values.discover.enabled }}{{ if not .Values.nfd.enabled }}true{{ end }}{{ else if .Values.discover.enabled }}true{{ end }}
{{- end }}

{{/* What a container of ours may: nothing that it does not need. */}}
{{- define "gpuvirt.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* As whom pods of ours run. */}}
{{- define "gpuvirt.nobody" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
