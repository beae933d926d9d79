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
{{- $tag := include "gpuvirt.text" (.Values.image.tag | default .Chart.AppVersion) -}}
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

{{/* Rules for all that names devices of virtual machines: an entry for one of these is never taken away. */}}
{{- define "gpuvirt.machines" -}}
# The devices that virtual machines name, in whatever kind of object: an entry for one of these is never taken away.
- apiGroups: [kubevirt.io]
  resources: [virtualmachines, virtualmachineinstances, virtualmachineinstancereplicasets]
  verbs: {{ . }}
- {apiGroups: [pool.kubevirt.io], resources: [virtualmachinepools], verbs: {{ . }}}
- apiGroups: [instancetype.kubevirt.io]
  resources: [virtualmachineinstancetypes, virtualmachineclusterinstancetypes]
  verbs: {{ . }}
# Instance types as they were when machines were made of them. RBAC knows no labels, by which these alone are read.
- {apiGroups: [apps], resources: [controllerrevisions], verbs: {{ . }}}
{{- end }}
