{{/* Checks that values.schema.json cannot express: values that contradict each other, or that gpuvirt does not support. */}}
{{- define "gpuvirt.refusals" -}}
{{- if and .Values.kata.enabled (not .Values.sandboxWorkloads.enabled) -}}
{{- fail "kata.enabled: no node is for VMs; set sandboxWorkloads.enabled=true, too" -}}
{{- end -}}
{{- if and .Values.scheduler.enabled (not .Values.extender.enabled) -}}
{{- fail "scheduler.enabled: the second scheduler asks the extender; set extender.enabled=true, too" -}}
{{- end -}}
{{- if and .Values.dra.enabled (not (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail (printf "dra.enabled: claims (DRA) get GPUs from Kubernetes 1.36.3 on, whose scheduler gives none twice; this cluster has %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- with .Values.extender.tls -}}
{{- if and .clients.caSecretName (not .secretName) -}}
{{- fail "extender.tls.clients.caSecretName: clients send certificates only with TLS; set extender.tls.secretName, too" -}}
{{- end -}}
{{- if and .clients.names (not .clients.caSecretName) -}}
{{- fail "extender.tls.clients.names: the extender asks for no certificates; set extender.tls.clients.caSecretName, too" -}}
{{- end -}}
{{- if and .clients.caSecretName $.Values.scheduler.enabled (not $.Values.scheduler.tls.secretName) -}}
{{- fail "extender.tls.clients.caSecretName: the second scheduler needs a certificate of this CA; set scheduler.tls.secretName, too" -}}
{{- end -}}
{{- end -}}
{{- if .Values.webhook.enabled -}}
{{- if not (or .Values.webhook.config.classes .Values.scheduler.enabled) -}}
{{- fail "webhook.enabled: it has no RuntimeClass; set webhook.config.classes, as in --set webhook.config.classes.kata-gpu.profile=hot-plug, or scheduler.enabled for pods with shares" -}}
{{- end -}}
{{- with .Values.webhook.tls -}}
{{- if and .secretName .certManager.enabled -}}
{{- fail "webhook.tls.secretName: cert-manager writes a Secret of its own; leave it out, or set webhook.tls.certManager.enabled=false" -}}
{{- end -}}
{{- if and .secretName (not .caBundle) -}}
{{- fail "webhook.tls.secretName: the API server needs the CA of this certificate; set webhook.tls.caBundle, too (--set-file webhook.tls.caBundle=ca.crt)" -}}
{{- end -}}
{{- if and .caBundle (not .secretName) -}}
{{- fail "webhook.tls.caBundle: it belongs to a certificate of your own; set webhook.tls.secretName, too" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.vgpuManager -}}
{{- if and .enabled (not (and .repository .version)) (not (include "gpuvirt.whole" .)) -}}
{{- fail "vgpuManager.enabled: the vGPU manager is an image of your own (docs/vgpu-manager-image.md); set vgpuManager.repository and vgpuManager.version, too, or vgpuManager.image to the whole reference" -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "/nvidia/(k8s|cloud-native)/?$" .Values.nvidiaRegistry -}}
{{- fail (printf "nvidiaRegistry: %s ends with a folder below nvidia; the images are in several of these folders, so end it with nvidia" .Values.nvidiaRegistry) -}}
{{- end -}}
{{- range list "driver" "toolkit" "devicePlugin" "dcgm" "dcgmExporter" "gfd" -}}
{{- $part := get $.Values . -}}
{{- if and $part.enabled (not (include "gpuvirt.whole" $part)) (not (include "gpuvirt.repository" (list $ . $part))) -}}
{{- fail (printf "%s.enabled: its image has no repository; set %s.repository, or nvidiaRegistry for all operands of container nodes" . .) -}}
{{- end -}}
{{- end -}}
{{- $driver := include "gpuvirt.nvidias" (list . "driver") | fromYaml -}}
{{- if $driver.enabled -}}
{{- if not (or $driver.manager.repository (include "gpuvirt.whole" $driver.manager)) -}}
{{- fail "driver.manager: its image has no repository; set driver.manager.repository too" -}}
{{- end -}}
{{- end -}}
{{- if dig "nvidiaDriverCRD" "enabled" false .Values.driver -}}
{{- fail "driver.nvidiaDriverCRD.enabled: gpuvirt does not read NVIDIADriver objects; set driver.repository and driver.version instead" -}}
{{- end -}}
{{- if dig "deployCR" false (.Values.gpuCluster | default dict) -}}
{{- fail "gpuCluster.deployCR: gpuvirt does not read GPUCluster objects; leave it out" -}}
{{- end -}}
{{- end }}
