{{/* The labels and annotations of a hook: (dict "root" $ "name" "install" "hooks" "pre-install" "weight" 1), and
"logs" if helm prints more than the output of a hook that failed. */}}
{{- define "gpuvirt.hook" -}}
labels:
  {{- include "gpuvirt.labels" (list .root .name) | nindent 2 }}
annotations:
  helm.sh/hook: {{ .hooks }}
  helm.sh/hook-weight: {{ .weight | quote }}
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
  helm.sh/hook-output-log-policy: {{ .logs | default "hook-failed" }}
{{- end }}

{{/* The spec of a Job that runs one command of gpuvirt: (dict "root" $ "name" "install" "args" (list "install" "crds")).
"given" is an optional ConfigMap that is mounted at /given. A configuration error (exit code 2) is not retried. */}}
{{- define "gpuvirt.job" -}}
backoffLimit: 3
activeDeadlineSeconds: 240
podFailurePolicy:
  rules:
    - {action: FailJob, onExitCodes: {operator: In, values: [2]}}
template:
  metadata:
    labels:
      {{- include "gpuvirt.labels" (list .root .name) | nindent 6 }}
  spec:
    serviceAccountName: {{ include "gpuvirt.name" .root }}-{{ .name }}
    restartPolicy: Never
    {{- with .root.Values.jobs.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    {{- with .root.Values.operator.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .root.Values.operator.nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "gpuvirt.nobody" .root | nindent 6 }}
    containers:
      - name: {{ .name }}
        image: {{ include "gpuvirt.image" .root | quote }}
        imagePullPolicy: {{ .root.Values.image.pullPolicy }}
        args: {{ toJson .args }}
        env:
          - {name: GPUVIRT_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
        securityContext:
          {{- include "gpuvirt.unprivileged" .root | nindent 10 }}
        resources:
          {{- toYaml .root.Values.jobs.resources | nindent 10 }}
        {{- if .given }}
        volumeMounts:
          - {name: given, mountPath: /given, readOnly: true}
        {{- end }}
    {{- with .given }}
    volumes:
      - {name: given, configMap: {name: {{ . }}}}
    {{- end }}
{{- end }}
