{{/* Names, labels, and the image. */}}

{{/* How the names of the controller's, the discoverer's and the Jobs' objects begin. All other names are fixed: programs
find those objects by name, and a cluster has one gpuvirt. */}}
{{- define "gpuvirt.name" -}}
{{ .Values.fullnameOverride | default .Values.nameOverride | default "gpuvirt" }}
{{- end }}

{{/* Labels of an object: (list $ "controller"). */}}
{{- define "gpuvirt.labels" -}}
{{- with (first .).Values.commonLabels }}
{{- toYaml . }}
{{ end }}
{{- include "gpuvirt.ownLabels" . }}
{{- end }}

{{/* Labels that no value changes: (list $ "controller"). */}}
{{- define "gpuvirt.ownLabels" -}}
{{- $root := first . -}}
{{ include "gpuvirt.selector" . }}
app.kubernetes.io/part-of: gpuvirt
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The labels that select the pods of a component: (list $ "controller"). */}}
{{- define "gpuvirt.selector" -}}
app.kubernetes.io/name: gpuvirt
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{/* gpuvirt's image, from repository and tag. */}}
{{- define "gpuvirt.image" -}}
{{- $tag := include "gpuvirt.text" (.Values.image.tag | default .Chart.AppVersion) -}}
{{ .Values.image.repository }}{{ hasPrefix "sha256:" $tag | ternary "@" ":" }}{{ $tag }}
{{- end }}

{{/* The image of the second kube-scheduler: of the cluster's own version unless a tag is set. */}}
{{- define "gpuvirt.schedulerImage" -}}
{{- $image := .Values.scheduler.image -}}
{{- $tag := include "gpuvirt.text" ($image.tag | default (regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" .Capabilities.KubeVersion.Version)) -}}
{{ $image.repository }}{{ hasPrefix "sha256:" $tag | ternary "@" ":" }}{{ $tag }}
{{- end }}

{{/* Where the pods of a Deployment run: (list $ "extender"). Replicas prefer different nodes. */}}
{{- define "gpuvirt.placement" -}}
{{- $values := get (first .).Values (last .) -}}
{{- with $values.priorityClassName -}}
priorityClassName: {{ . }}
{{ end -}}
{{- with $values.nodeSelector -}}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with $values.tolerations -}}
tolerations:
  {{- toYaml . | nindent 2 }}
{{ end -}}
{{- $affinity := deepCopy $values.affinity -}}
{{- if not (hasKey $affinity "podAntiAffinity") -}}
{{- $others := dict "matchLabels" (include "gpuvirt.selector" . | fromYaml) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $others -}}
{{- $preferred := list (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $preferred) -}}
{{- end -}}
affinity:
  {{- toYaml $affinity | nindent 2 }}
{{- end }}

{{/* The names of the pull Secrets of all images, as a JSON list. */}}
{{- define "gpuvirt.pullSecretNames" -}}
{{- $names := .Values.image.pullSecrets -}}
{{- range dig "imagePullSecrets" list (.Values.global | default dict) -}}
{{- $names = append $names (kindIs "map" . | ternary (get (kindIs "map" . | ternary . dict) "name") .) -}}
{{- end -}}
{{ toJson (uniq $names) }}
{{- end }}

{{/* The pull Secrets of pods and service accounts. */}}
{{- define "gpuvirt.pullSecrets" -}}
{{- range include "gpuvirt.pullSecretNames" . | fromJsonArray }}
- name: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Whether `gpuvirt discover` runs: "true" or empty. */}}
{{- define "gpuvirt.discovers" -}}
{{- if kindIs "invalid" .Values.discover.enabled }}{{ if not .Values.nfd.enabled }}true{{ end }}{{ else if .Values.discover.enabled }}true{{ end }}
{{- end }}

{{/* Whether the controller keeps the webhook's certificate: "true" or empty. */}}
{{- define "gpuvirt.keepsCertificate" -}}
{{- with .Values.webhook }}{{ if and .enabled (not .tls.secretName) (not .tls.certManager.enabled) }}true{{ end }}{{ end }}
{{- end }}

{{/* The security context of gpuvirt's unprivileged containers. */}}
{{- define "gpuvirt.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Whether the cluster is an OpenShift: "true" or empty. `helm template` needs --api-versions security.openshift.io/v1. */}}
{{- define "gpuvirt.openshift" -}}
{{- if .Capabilities.APIVersions.Has "security.openshift.io/v1" }}true{{ end }}
{{- end }}

{{/* The security context of gpuvirt's unprivileged pods. On OpenShift, the namespace has a range of UIDs of its own, and
the SCC restricted-v2 refuses others. */}}
{{- define "gpuvirt.nobody" -}}
runAsNonRoot: true
{{- if not (include "gpuvirt.openshift" .) }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Rules for all kinds that name devices of VMs: gpuvirt never removes the entry of such a device. */}}
{{- define "gpuvirt.vms" -}}
# All kinds that name devices of VMs: gpuvirt never removes the entry of such a device from KubeVirt's configuration.
- apiGroups: [kubevirt.io]
  resources: [virtualmachines, virtualmachineinstances, virtualmachineinstancereplicasets]
  verbs: {{ . }}
- {apiGroups: [pool.kubevirt.io], resources: [virtualmachinepools], verbs: {{ . }}}
- apiGroups: [instancetype.kubevirt.io]
  resources: [virtualmachineinstancetypes, virtualmachineclusterinstancetypes]
  verbs: {{ . }}
# Instance types at the time when VMs were created with them. gpuvirt selects them by label, which RBAC cannot.
- {apiGroups: [apps], resources: [controllerrevisions], verbs: {{ . }}}
{{- end }}
