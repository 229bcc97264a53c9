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

{{/* An image's reference; the argument is a dict of the root context, the image's name and, where it has one of its own, its tag. */}}
{{- define "hearth.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end }}{{ .name }}:{{ .tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "hearth.workerImage" -}}
{{- include "hearth.image" (dict "root" . "name" .Values.image.worker "tag" .Values.image.workerTag) }}
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
