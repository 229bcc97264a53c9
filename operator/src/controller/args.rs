//! The command line of `hearth operator`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use hearth_controller_core::host_paths::HostPath;
use hearth_controller_core::observed::{LedgerSettings, NodeSettings, Requests, Settings, Tracing};
use hearth_controller_core::quantity::millis;
use hearth_crds::{DurationText, HUB_ENDPOINT, MemoryQuantity};
use ipnet::IpNet;
use reqwest::Url;

use crate::services::agents::ranges;
use crate::telemetry::LogFormat;

const EXAMPLES: &str = "Examples:\n  \
    hearth operator --worker-image ghcr.io/hearth-dev/hearth-worker:0.1.0\n  \
    hearth operator --worker-image hearth-worker:dev --namespaces team-a,team-b --leader-elect false";

/// Arguments of `hearth operator`. Each can be given by the environment too, as the chart does.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct OperatorArgs {
    /// Image of the workers
    #[arg(long, value_name = "IMAGE", env = "HEARTH_WORKER_IMAGE")]
    pub(crate) worker_image: String,
    /// When nodes pull that image: Always, IfNotPresent or Never
    #[arg(long, value_name = "POLICY", env = "HEARTH_PULL_POLICY", default_value = "IfNotPresent",
        value_parser = ["Always", "IfNotPresent", "Never"])]
    pub(crate) pull_policy: String,
    /// Image pull Secret; repeat it or separate several with commas
    #[arg(
        long = "pull-secret",
        value_name = "NAME",
        env = "HEARTH_PULL_SECRETS",
        value_delimiter = ','
    )]
    pub(crate) pull_secrets: Vec<String>,
    /// Namespace of the operator and its agents [default: POD_NAMESPACE]
    #[arg(long, value_name = "NAMESPACE", env = "HEARTH_OPERATOR_NAMESPACE")]
    pub(crate) operator_namespace: Option<String>,
    /// Name of the operator's own Deployment, the owner of the objects it keeps for itself
    #[arg(long, value_name = "NAME", env = "HEARTH_OPERATOR_DEPLOYMENT")]
    pub(crate) operator_deployment: Option<String>,
    /// Namespaces to serve, comma-separated [default: all namespaces]
    #[arg(
        long,
        value_name = "A,B",
        env = "HEARTH_NAMESPACES",
        value_delimiter = ','
    )]
    pub(crate) namespaces: Vec<String>,
    /// Elect a leader among the operator's replicas with the Lease hearth-operator
    #[arg(long, value_name = "BOOL", env = "HEARTH_LEADER_ELECT", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) leader_elect: bool,
    /// This replica's name in the Lease [default: POD_NAME, or the host's name]
    #[arg(long, value_name = "NAME", env = "POD_NAME", hide = true)]
    pub(crate) identity: Option<String>,
    /// RuntimeClass of GPU Pods, such as nvidia, unless the deployment names one [default: the cluster's]
    #[arg(long, value_name = "NAME", env = "HEARTH_GPU_RUNTIME_CLASS")]
    pub(crate) gpu_runtime_class: Option<String>,
    /// Claim GPUs by UUID where the cluster has dynamic resource allocation with NVIDIA's driver
    #[arg(long, value_name = "BOOL", env = "HEARTH_GPU_CLAIMS", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) gpu_claims: bool,
    /// Watch the Pods of the whole cluster, so that plans leave them what they request
    #[arg(long, value_name = "BOOL", env = "HEARTH_LEDGER_ALL_PODS", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) ledger_all_pods: bool,
    /// CPU that plans leave unused on each node
    #[arg(long, value_name = "CPU", env = "HEARTH_LEDGER_RESERVE_CPU", default_value = "100m", value_parser = cpu_millis)]
    pub(crate) ledger_reserve_cpu: u64,
    /// CPU left to other Pods on each node where those cannot be watched
    #[arg(long, value_name = "CPU", env = "HEARTH_LEDGER_UNSEEN_CPU", default_value = "500m", value_parser = cpu_millis)]
    pub(crate) ledger_unseen_cpu: u64,
    /// Memory left to other Pods on each node where those cannot be watched
    #[arg(
        long,
        value_name = "MEMORY",
        env = "HEARTH_LEDGER_UNSEEN_MEMORY",
        default_value = "512Mi"
    )]
    pub(crate) ledger_unseen_memory: MemoryQuantity,
    /// Directory on the nodes where agents keep fetched models
    #[arg(
        long,
        value_name = "DIR",
        env = "HEARTH_MODEL_CACHE",
        default_value = "/var/lib/hearth/models"
    )]
    pub(crate) model_cache: String,
    /// Node directories that deployments may read models below, comma-separated; empty for none
    #[arg(
        long,
        value_name = "A,B",
        env = "HEARTH_HOST_PATHS",
        value_delimiter = ',',
        default_value = "/models,/var/lib/hearth/models",
        value_parser = host_path
    )]
    pub(crate) host_paths: Vec<Option<HostPath>>,
    /// Address ranges of Pods and Services, from which no model is fetched, comma-separated; nodes' Pod CIDRs and the
    /// cluster's ServiceCIDRs are found without this option
    #[arg(
        long = "cluster-range",
        value_name = "CIDR",
        env = "HEARTH_CLUSTER_RANGES",
        value_delimiter = ',',
        value_parser = range
    )]
    pub(crate) cluster_ranges: Vec<Option<IpNet>>,
    /// Address of the hub that models of spec.model.source.huggingFace come from, if not the public one: a mirror
    #[arg(
        long,
        value_name = "URL",
        env = "HEARTH_HUB_ENDPOINT",
        default_value = HUB_ENDPOINT,
        value_parser = hub_endpoint
    )]
    pub(crate) hub_endpoint: String,
    /// Address of the API server's Service, which the kubelet sets in every Pod
    #[arg(long, env = "KUBERNETES_SERVICE_HOST", hide = true)]
    pub(crate) api_address: Option<String>,
    /// Create NetworkPolicies
    #[arg(long, value_name = "BOOL", env = "HEARTH_NETWORK_POLICIES", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) network_policies: bool,
    /// Collector that gateways and workers send their spans to by OTLP over HTTP, such as
    /// http://collector.monitoring.svc:4318 [default: none, no traces]
    #[arg(
        long,
        value_name = "URL",
        env = "HEARTH_OTLP_ENDPOINT",
        value_parser = otlp_endpoint
    )]
    pub(crate) otlp_endpoint: Option<Url>,
    /// Share of the traces that are recorded, from 0 to 1; a client that begins one decides itself
    #[arg(
        long,
        value_name = "RATIO",
        env = "HEARTH_TRACE_SAMPLE_RATIO",
        default_value_t = 1.0,
        value_parser = ratio
    )]
    pub(crate) trace_sample_ratio: f64,
    /// Lifetime of a deployment's certificates, renewed after two thirds of it
    #[arg(
        long,
        value_name = "DURATION",
        env = "HEARTH_CERTIFICATE_LIFETIME",
        default_value = "2160h",
        value_parser = certificate_lifetime
    )]
    pub(crate) certificate_lifetime: DurationText,
    /// Keep the certificate authority when the operator's Deployment is deleted, as the CRDs are kept
    #[arg(long, value_name = "BOOL", env = "HEARTH_KEEP_AUTHORITY", default_value_t = false, action = clap::ArgAction::Set)]
    pub(crate) keep_authority: bool,
    /// Time a node may be NotReady before its work moves to other nodes
    #[arg(
        long,
        value_name = "DURATION",
        env = "HEARTH_NODE_MOVE_AFTER",
        default_value = "20s"
    )]
    pub(crate) node_move_after: DurationText,
    /// Time a node may be NotReady before its leftover Pods are force-deleted
    #[arg(
        long,
        value_name = "DURATION",
        env = "HEARTH_NODE_FORGET_AFTER",
        default_value = "5m"
    )]
    pub(crate) node_forget_after: DurationText,
    /// Time that ready workers stay before they end for another deployment's
    #[arg(
        long,
        value_name = "DURATION",
        env = "HEARTH_MIN_RESIDENCE",
        default_value = "1m"
    )]
    pub(crate) min_residence: DurationText,
    /// Keys of short-lived NoExecute taints, such as a network plugin's, that workers tolerate for 300 s
    #[arg(
        long,
        value_name = "A,B",
        env = "HEARTH_PASSING_TAINTS",
        value_delimiter = ',',
        default_value = "node.cilium.io/agent-not-ready"
    )]
    pub(crate) passing_taints: Vec<String>,
    /// Run an agent on each node, to measure it and fetch models
    #[arg(long, value_name = "BOOL", env = "HEARTH_AGENTS", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) agents: bool,
    /// Deployments reconciled concurrently
    #[arg(long, value_name = "N", env = "HEARTH_CONCURRENCY", default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) concurrency: u32,
    /// Longest time between two reconciles of a deployment
    #[arg(
        long,
        value_name = "DURATION",
        env = "HEARTH_RESYNC",
        default_value = "8m",
        value_parser = resync
    )]
    pub(crate) resync: DurationText,
    /// Address of /healthz, /readyz and /metrics; [::] is any address, IPv4 included
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "HEARTH_LISTEN",
        default_value = "[::]:8081"
    )]
    pub(crate) listen: SocketAddr,
    /// Log level: error, warn, info, debug, or a filter by module
    #[arg(
        long,
        value_name = "FILTER",
        env = "HEARTH_LOG",
        default_value = "info"
    )]
    pub(crate) log: String,
    /// Format of log lines
    #[arg(
        long,
        value_name = "FORMAT",
        env = "HEARTH_LOG_FORMAT",
        default_value = "text"
    )]
    pub(crate) log_format: LogFormat,
}

/// A kubelet brings a renewed certificate to its Pods within minutes, and a third of the lifetime is left for that.
fn certificate_lifetime(text: &str) -> Result<DurationText, String> {
    at_least(text, "10m")
}

/// CPU in thousandths of one, from a quantity of Kubernetes.
fn cpu_millis(text: &str) -> Result<u64, String> {
    millis(text).ok_or_else(|| "write CPU as 500m or 2".to_owned())
}

/// An empty text is what an empty list looks like.
fn host_path(text: &str) -> Result<Option<HostPath>, String> {
    match text.trim() {
        "" => Ok(None),
        text => HostPath::parse(text).map(Some),
    }
}

/// An empty text is what an empty list looks like.
fn range(text: &str) -> Result<Option<IpNet>, String> {
    match text.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            format!("{text:?} is not a range of addresses\n  write one as 10.42.0.0/16")
        }),
    }
}

/// The agents would refuse another with each fetch.
fn hub_endpoint(text: &str) -> Result<String, String> {
    let host = ["https://", "http://"]
        .iter()
        .find_map(|scheme| text.strip_prefix(scheme));
    let is_plain = host.is_some_and(|host| {
        !host.is_empty() && !host.starts_with('/') && !host.contains(['?', '#', '@', ' '])
    });
    match is_plain {
        true => Ok(text.to_owned()),
        false => Err("it is not the address of a hub\n  write one as https://hub.lan".to_owned()),
    }
}

/// Workers would refuse another as they start.
fn otlp_endpoint(text: &str) -> Result<Url, String> {
    let url = Url::parse(text).ok();
    let url = url.filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    url.ok_or_else(|| {
        "it is not the URL of a collector\n  write one as http://collector.monitoring.svc:4318"
            .to_owned()
    })
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok();
    let ratio = ratio.filter(|ratio| (0.0..=1.0).contains(ratio));
    ratio.ok_or_else(|| "write a share from 0 to 1, such as 0.1".to_owned())
}

/// No busy loop.
fn resync(text: &str) -> Result<DurationText, String> {
    at_least(text, "500ms")
}

fn at_least(text: &str, least: &str) -> Result<DurationText, String> {
    let parse = |text: &str| {
        text.parse::<DurationText>()
            .map_err(|error| error.to_string())
    };
    let span = parse(text)?;
    if span.get() < parse(least)?.get() {
        return Err(format!("write {least} or more"));
    }
    Ok(span)
}

impl OperatorArgs {
    /// What the reconciler needs of them. `pod_namespace` is the namespace that the process runs in.
    pub(crate) fn settings(&self, pod_namespace: Option<String>) -> Settings {
        let mut namespaces: Vec<String> = self
            .namespaces
            .iter()
            .map(|name| name.trim().to_owned())
            .filter(|name| !name.is_empty())
            .collect();
        namespaces.sort();
        namespaces.dedup();
        Settings {
            worker_image: self.worker_image.clone(),
            pull_policy: self.pull_policy.clone(),
            pull_secrets: self
                .pull_secrets
                .iter()
                .filter(|name| !name.is_empty())
                .cloned()
                .collect(),
            operator_namespace: self
                .operator_namespace
                .clone()
                .or(pod_namespace)
                .unwrap_or_else(|| "hearth-system".to_owned()),
            namespaces,
            gpu_runtime_class: self
                .gpu_runtime_class
                .clone()
                .filter(|name| !name.is_empty()),
            claims: self.gpu_claims,
            ledger: LedgerSettings {
                all_pods: self.ledger_all_pods,
                reserve_cpu_millis: self.ledger_reserve_cpu,
                unseen: Requests {
                    cpu_millis: self.ledger_unseen_cpu,
                    memory_bytes: self.ledger_unseen_memory.bytes(),
                    gpus: 0,
                },
            },
            model_cache: self.model_cache.clone(),
            host_paths: self.host_paths.iter().flatten().cloned().collect(),
            cluster_ranges: self.cluster_ranges(),
            hub_endpoint: self.hub_endpoint.clone(),
            network_policies: self.network_policies,
            tracing: self.tracing(),
            keeps_authority: self.keep_authority,
            certificate_lifetime: self.certificate_lifetime.get(),
            nodes: NodeSettings {
                move_after: self.node_move_after.get(),
                forget_after: self.node_forget_after.get().max(self.node_move_after.get()),
                min_residence: self.min_residence.get(),
                passing_taints: self
                    .passing_taints
                    .iter()
                    .filter(|key| !key.is_empty())
                    .cloned()
                    .collect(),
            },
        }
    }

    fn tracing(&self) -> Option<Tracing> {
        let url = self.otlp_endpoint.as_ref()?;
        Some(Tracing {
            endpoint: url.as_str().trim_end_matches('/').to_owned(),
            host: url.host_str()?.to_owned(),
            port: url.port_or_known_default()?,
            sample_ratio: self.trace_sample_ratio,
        })
    }

    fn cluster_ranges(&self) -> Vec<IpNet> {
        let api = self
            .api_address
            .as_deref()
            .and_then(|text| text.parse().ok());
        let given = self.cluster_ranges.iter().flatten().copied();
        given.chain(api.map(ranges::around_api)).collect()
    }

    /// The resync.
    pub(crate) fn resync(&self) -> Duration {
        self.resync.get()
    }
}
