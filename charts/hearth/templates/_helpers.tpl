{{/* Labels of every object; the argument is a dict of the root context and the component. */}}
{{- define "hearth.labels" -}}
app.kubernetes.io/name: hearth
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Labels that select a component's Pods. */}}
{{- define "hearth.selector" -}}
app.kubernetes.io/name: hearth
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image's reference; the argument is a dict of the root context, the image's name, its digest and, where it has one of its own, its tag. */}}
{{- define "hearth.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .name -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "hearth.operatorImage" -}}
{{- include "hearth.image" (dict "root" . "name" .Values.image.operator "digest" .Values.image.digest) }}
{{- end }}

{{- define "hearth.workerImage" -}}
{{- include "hearth.image" (dict "root" . "name" .Values.image.worker "tag" .Values.image.workerTag "digest" .Values.image.workerDigest) }}
{{- end }}

{{/* Fails for values that contradict each other or would have no effect. */}}
{{- define "hearth.check" -}}
{{- with .Values.image }}
{{- if and .workerTag .workerDigest }}
{{- fail (printf "image.workerTag is %s, and image.workerDigest is set, too: a digest names the image alone, so leave workerTag empty" .workerTag) }}
{{- end }}
{{- end }}
{{- $authorities := compact (list (.Values.caBundle).pem (.Values.caBundle).configMap (.Values.caBundle).secret) }}
{{- if gt (len $authorities) 1 }}
{{- fail "caBundle has several of pem, configMap and secret: set one of them, and put all certificates there" }}
{{- end }}
{{- with (.Values.caBundle).pem }}
{{- if not (contains "-----BEGIN CERTIFICATE-----" .) }}
{{- fail "caBundle.pem holds no certificate in PEM (BEGIN CERTIFICATE): give the file's content, --set-file caBundle.pem=FILE" }}
{{- end }}
{{- end }}
{{- $proxies := compact (list (.Values.proxy).http (.Values.proxy).https) }}
{{- if and (.Values.proxy).noProxy (not $proxies) (not (include "hearth.proxyVariables" .)) }}
{{- fail "proxy.noProxy is set, and there is no proxy: set proxy.http and proxy.https, too, or leave it empty" }}
{{- end }}
{{- if and (not .Values.agent.enabled) (or $authorities $proxies) }}
{{- fail "caBundle and proxy are for what agents fetch, and agent.enabled is false: leave them empty, or enable the agents" }}
{{- end }}
{{- if (.Values.power).enabled }}
{{- if not (or (.Values.power).idlePercent (.Values.power).quietHours) }}
{{- fail "power.enabled is true, and neither power.idlePercent nor power.quietHours lowers a limit: set one of them, or leave power.enabled false" }}
{{- end }}
{{- range (.Values.power).quietHours }}
{{- if eq .from .to }}
{{- fail (printf "power.quietHours has from %s to %s, which ends when it begins: write 00:00 to 24:00 for the whole day, or leave it out" .from .to) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "hearth.checkVariables" (dict "path" "operator.env" "variables" .Values.operator.env "own" (list "POD_NAME" "POD_NAMESPACE")) }}
{{- include "hearth.checkVariables" (dict "path" "agent.env" "variables" .Values.agent.env "own" (list "NODE_NAME" "NVIDIA_VISIBLE_DEVICES")) }}
{{- range .Values.agent.env }}
{{- $name := upper .name }}
{{- if or (and (eq $name "HTTP_PROXY") ($.Values.proxy).http) (and (eq $name "HTTPS_PROXY") ($.Values.proxy).https) (and (eq $name "NO_PROXY") ($.Values.proxy).noProxy) }}
{{- fail (printf "agent.env has %s, which proxy sets, too: write it in one place" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Names of proxies in the agents' own variables. */}}
{{- define "hearth.proxyVariables" -}}
{{- range .Values.agent.env }}
{{- if has (upper .name) (list "HTTP_PROXY" "HTTPS_PROXY" "ALL_PROXY") }}{{ .name }} {{ end }}
{{- end }}
{{- end }}

{{/* Fails for variables that Hearth sets itself, are there twice, or have no value; the argument is a dict of their path, the variables, and those of Hearth without its prefix. */}}
{{- define "hearth.checkVariables" -}}
{{- $all := . }}
{{- $seen := list }}
{{- range .variables }}
{{- if or (hasPrefix "HEARTH_" .name) (has .name $all.own) }}
{{- fail (printf "%s has %s, which the chart sets: change the value that it is for" $all.path .name) }}
{{- end }}
{{- if has .name $seen }}
{{- fail (printf "%s has %s twice: write it once" $all.path .name) }}
{{- end }}
{{- $seen = append $seen .name }}
{{- if eq (hasKey . "value") (hasKey . "valueFrom") }}
{{- fail (printf "%s has %s without a value or with two: write either value or valueFrom" $all.path .name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hearth.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pod Security restricted, for one container. */}}
{{- define "hearth.restricted" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- end }}

{{/* Where Pods may run; the argument is the component's values. */}}
{{- define "hearth.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Directories of nodes that deployments may name, with commas. */}}
{{- define "hearth.hostPaths" -}}
{{- $prefixes := (.Values.hostPath).allowedPrefixes -}}
{{- if kindIs "slice" $prefixes -}}
{{- join "," $prefixes -}}
{{- else -}}
/models,{{ .Values.agent.directory }}/models
{{- end -}}
{{- end }}

{{/* What the operator does with the objects of deployments: in each namespace that it serves. */}}
{{- define "hearth.deploymentRules" -}}
- apiGroups: [hearth.dev]
  resources: [inferenceplans]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [hearth.dev]
  resources: [inferenceplans/status]
  verbs: [patch]
- apiGroups: [hearth.dev]
  resources: [inferencepoolscalers]
  verbs: [get, list, watch, create, delete]
- apiGroups: [hearth.dev]
  resources: [inferencepoolscalers/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods, services]
  verbs: [get, list, watch, create, patch, delete]
# Certificates, in the Secrets NAME-hearth-certificates (delete: of their name in earlier versions), and what secretRef of an http
# source names. The rights cannot be given by label; the operator lists and watches by label.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.gpu.claims }}
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [create]
{{- end }}
# Whether a model's claim can be mounted on several nodes.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
# What the kubelet says of a Pod that does not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
