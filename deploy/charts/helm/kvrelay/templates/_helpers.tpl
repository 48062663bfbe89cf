{{/* The name of everything, and of the RayCluster: KubeRay adds up to 23 characters to it. */}}
{{- define "kvrelay.name" -}}
{{- include "kvrelay.nameOf" .Release.Name -}}
{{- end -}}

{{/* That of another release of this chart. */}}
{{- define "kvrelay.nameOf" -}}
{{- ternary . (printf "%s-kvrelay" .) (contains "kvrelay" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvrelay.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kvrelay.routerLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: router
{{- end -}}

{{/* What KubeRay puts on the pods of the RayCluster. */}}
{{- define "kvrelay.rayLabels" -}}
ray.io/cluster: {{ include "kvrelay.name" . }}
{{- end -}}

{{- define "kvrelay.image" -}}
{{ printf "%v:%v" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end -}}

{{/* The Secret with the certificates between router and workers; empty: plain text. */}}
{{- define "kvrelay.tlsSecret" -}}
{{- if .Values.tls.issuer.name -}}
{{- .Values.tls.secret | default (printf "%s-tls" (include "kvrelay.name" .)) -}}
{{- else -}}
{{- .Values.tls.secret -}}
{{- end -}}
{{- end -}}

{{/* The Secret from which all routers draw seeds. */}}
{{- define "kvrelay.seedSecret" -}}
{{- .Values.seedSecret | default (printf "%s-seed" (include "kvrelay.name" .)) -}}
{{- end -}}

{{/* What routers show clients is TLS. */}}
{{- define "kvrelay.clientTls" -}}
{{- if or (include "kvrelay.tlsSecret" .) .Values.tls.clientSecret -}}true{{- end -}}
{{- end -}}

{{- define "kvrelay.check" -}}
{{- if not (regexMatch "^[a-z]" .Release.Name) -}}
{{- fail "the release's name must begin with a letter, as KubeRay wants it" -}}
{{- end -}}
{{- if and (not (include "kvrelay.tlsSecret" .)) (not .Values.tls.insecure) -}}
{{- fail "tls: set secret or issuer.name, or insecure: true for a network of your own" -}}
{{- end -}}
{{- if and .Values.tokenSecret (not (include "kvrelay.tlsSecret" .)) -}}
{{- fail "tokenSecret: routers would send a token to the controller in plain text: set tls.secret or tls.issuer.name" -}}
{{- end -}}
{{- if not (or .Values.tokenSecret .Values.tls.insecure) -}}
{{- fail "tokenSecret: without tokens everybody who reaches a router or the controller may use it: set it, or tls.insecure: true for a network of your own" -}}
{{- end -}}
{{- end -}}

{{/* The options of a map, sorted by name: true is a flag, false and null are left out. */}}
{{- define "kvrelay.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $name }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name (ternary (toString (int64 $value)) (toString $value) (and (kindIs "float64" $value) (eq (float64 (int64 $value)) (float64 $value)))) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What controller and routers are told alike. */}}
{{- define "kvrelay.sharedOptions" -}}
- {{ printf "--model=%v" .Values.model.source | quote }}
{{- with .Values.model.name }}
- {{ printf "--model-name=%v" . | quote }}
{{- end }}
- --dtype={{ .Values.model.dtype }}
# Metrics are in plain text always, so they take this even where all else is encrypted.
- --insecure
{{- if include "kvrelay.tlsSecret" . }}
- --tls-cert=/etc/kvrelay/tls/tls.crt
- --tls-key=/etc/kvrelay/tls/tls.key
- --tls-ca=/etc/kvrelay/tls/ca.crt
- --tls-name={{ include "kvrelay.name" . }}
{{- end }}
{{- if .Values.tokenSecret }}
- --auth-token-file=/etc/kvrelay/tokens/tokens
{{- end }}
{{- end -}}

{{/* How the controller is found and asked, on one line. */}}
{{- define "kvrelay.toController" -}}
--controller={{ include "kvrelay.name" . }}-controller:50052
{{- if include "kvrelay.tlsSecret" . }} --ca=/etc/kvrelay/tls/ca.crt{{ end }}
{{- if .Values.tokenSecret }} --token-file=/etc/kvrelay/tokens/admin{{ end }}
{{- end -}}

{{- define "kvrelay.podSecurity" -}}
runAsNonRoot: true
runAsUser: 2000
runAsGroup: 2000
fsGroup: 2000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvrelay.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Files of controller, routers and workers. */}}
{{- define "kvrelay.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/kvrelay
{{- if .Values.model.claim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if include "kvrelay.tlsSecret" . }}
- name: tls
  mountPath: /etc/kvrelay/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvrelay.volumes" -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- if .Values.model.claim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.model.claim | quote }}
    readOnly: true
{{- end }}
{{- with include "kvrelay.tlsSecret" . }}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Tokens, which controller and routers know. */}}
{{- define "kvrelay.tokenMounts" -}}
{{- if .Values.tokenSecret }}
- name: tokens
  mountPath: /etc/kvrelay/tokens
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvrelay.tokenVolumes" -}}
{{- with .Values.tokenSecret }}
- name: tokens
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "kvrelay.hubEnv" -}}
{{- with .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: token
{{- end }}
{{- end -}}

{{/* What Ray's own processes are told, on every node. */}}
{{- define "kvrelay.rayEnv" -}}
# Workers compute at the priority of everything else; Ray would let all else go first.
- name: RAY_worker_niceness
  value: "0"
# At SIGTERM Ray waits for what runs here; by then the workers have left.
- name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
  value: "5"
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
{{- end -}}

{{/* The label of the Kubernetes node by which workers are near each other, as one of Ray's node. */}}
{{- define "kvrelay.nearEnv" -}}
{{- with .Values.worker.near }}
- name: KVRELAY_NEAR
  valueFrom:
    fieldRef:
      {{- if eq . "kubernetes.io/hostname" }}
      fieldPath: spec.nodeName
      {{- else }}
      # Of the pod: Kubernetes copies zone and region of the node to it, others are an admission policy's.
      fieldPath: {{ printf "metadata.labels['%s']" . | quote }}
      {{- end }}
- name: RAY_OVERRIDE_LABELS
  value: {{ dict . "$(KVRELAY_NEAR)" | toJson | quote }}
{{- end }}
{{- end -}}
