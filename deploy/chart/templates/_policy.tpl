{{/* The spec of the ClusterPolicy: the values that are set, under the names of the CustomResourceDefinition. */}}

{{/* The folder of each image in NVIDIA's registry, below `nvidia`. */}}
{{- define "gpuvirt.folders" -}}
driver: ""
toolkit: /k8s
devicePlugin: ""
dcgm: /cloud-native
dcgmExporter: /k8s
gfd: ""
k8s-driver-manager: /cloud-native
{{- end }}

{{/* A tag, version or count as a string: `--set` turns a value of digits into a number. */}}
{{- define "gpuvirt.text" -}}
{{ kindIs "string" . | ternary . (int64 . | toString) }}
{{- end }}

{{/* The repository of an image, from its own key or from nvidiaRegistry: (list $ "driver" .Values.driver). */}}
{{- define "gpuvirt.repository" -}}
{{- $root := index . 0 -}}
{{- $own := (index . 2).repository -}}
{{- $registry := $root.Values.nvidiaRegistry | trimSuffix "/" -}}
{{- if $own }}{{ $own }}{{ else if $registry }}{{ $registry | trimSuffix "/nvidia" }}/nvidia{{ get (include "gpuvirt.folders" $root | fromYaml) (index . 1) }}{{ end -}}
{{- end }}

{{/* Whether an image's name is a whole reference, with its repository and its tag or digest: "true" or empty. */}}
{{- define "gpuvirt.whole" -}}
{{- if and (not .repository) (or (contains "/" (.image | default "")) (contains "@" (.image | default ""))) }}true{{ end -}}
{{- end }}

{{/* An operand with NVIDIA's image, with its repository; not enabled if the repository is unknown: (list $ "driver"). */}}
{{- define "gpuvirt.nvidias" -}}
{{- $root := index . 0 -}}
{{- $part := deepCopy (get $root.Values (index . 1)) -}}
{{- if include "gpuvirt.whole" $part -}}
{{- $_ := unset $part "version" -}}
{{- else -}}
{{- $_ := set $part "repository" (include "gpuvirt.repository" (list $root (index . 1) $part)) -}}
{{- end -}}
{{- if kindIs "invalid" $part.enabled -}}
{{- $_ := set $part "enabled" (or (ne $part.repository "") (ne (include "gpuvirt.whole" $part) "")) -}}
{{- end -}}
{{- if not $part.enabled -}}
{{- $part = dict "enabled" false -}}
{{- else -}}
{{- $_ := unset $part "nvidiaDriverCRD" -}}
{{- with $part.manager -}}
{{- if include "gpuvirt.whole" . -}}
{{- $_ := unset . "version" -}}
{{- else -}}
{{- $_ := set . "repository" (include "gpuvirt.repository" (list $root "k8s-driver-manager" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml $part }}
{{- end }}

{{/* A mapping without unset values: null, empty strings, lists and mappings. */}}
{{- define "gpuvirt.set" -}}
{{- $kept := dict -}}
{{- range $key, $value := . -}}
{{- if kindIs "map" $value -}}
{{- $inner := include "gpuvirt.set" $value | fromYaml -}}
{{- if $inner -}}{{- $_ := set $kept $key $inner -}}{{- end -}}
{{- else if and (has $key (list "version" "maxUnavailable")) (ne (toJson $value) "null") -}}
{{- with include "gpuvirt.text" $value }}{{- $_ := set $kept $key . -}}{{- end -}}
{{- else if not (has (toJson $value) (list "null" "\"\"" "[]")) -}}
{{- $_ := set $kept $key $value -}}
{{- end -}}
{{- end -}}
{{ toYaml $kept }}
{{- end }}

{{- define "gpuvirt.policy" -}}
{{- $spec := dict "operator" (dict "runtimeClass" .Values.operator.runtimeClass) -}}
{{- range list "sandboxWorkloads" "vgpuManager" "vgpuDeviceManager" "vfioManager" "sandboxDevicePlugin" "kataSandboxDevicePlugin" "ccManager" "kataManager" "daemonsets" "hostPaths" "validator" "nodeStatusExporter" "mig" "migManager" "cdi" "gds" "gdrcopy" -}}
{{- $_ := set $spec . (deepCopy (get $.Values . | default dict)) -}}
{{- end -}}
{{- $_ := set $spec.daemonsets "labels" (mergeOverwrite (deepCopy .Values.commonLabels) ($spec.daemonsets.labels | default dict)) -}}
{{- range list "driver" "toolkit" "devicePlugin" "dcgm" "dcgmExporter" "gfd" -}}
{{- $_ := set $spec . (include "gpuvirt.nvidias" (list $ .) | fromYaml) -}}
{{- end -}}
{{- if not $spec.vgpuManager.enabled -}}{{- $_ := set $spec "vgpuManager" (dict "enabled" false) -}}{{- end -}}
{{- $kept := include "gpuvirt.set" $spec | fromYaml -}}
{{- range list "daemonsets" "dcgm" "dcgmExporter" "devicePlugin" "driver" "gfd" "nodeStatusExporter" "operator" "toolkit" -}}
{{- if not (hasKey $kept .) -}}{{- $_ := set $kept . dict -}}{{- end -}}
{{- end -}}
{{ toYaml $kept }}
{{- end }}
