//! Many deployments on many nodes: the time until all are planned and their Pods exist, and the cost.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use serde_json::{Value, json};

use super::process::Operator;
use super::stand::{Stand, is_settled};
use crate::metrics::Metrics;

/// Size of a scale test.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// Deployments of the built-in model, each of a gateway, a prefill worker and a decode worker.
    pub deployments: usize,
    /// Nodes with 32 CPUs and 64 GiB each: four deployments fit one.
    pub nodes: usize,
    /// Pods that are not Hearth's, evenly over the nodes.
    pub foreign_pods: usize,
    /// Length of the idle phase at the end.
    pub idle: Duration,
}

/// Results of a scale test.
#[derive(Clone, Debug)]
pub struct ScaleReport {
    /// Its size.
    pub scale: Scale,
    /// Time until every deployment had a plan and all its Pods.
    pub planned: Duration,
    /// Time until every deployment was ready.
    pub ready: Duration,
    /// Number of reconciles until then.
    pub reconciles: u64,
    /// Median and 99th percentile of reconcile times, as upper bounds of the histogram's buckets, in milliseconds.
    pub reconcile_ms: (f64, f64),
    /// Resident memory at the end and at its peak, in MiB.
    pub resident_mib: (f64, f64),
    /// CPU time until all were ready, in seconds.
    pub cpu_s: f64,
    /// Number of modifying requests, by method and resource.
    pub writes: BTreeMap<String, usize>,
    /// Number of writes while nothing changed.
    pub idle_writes: usize,
    /// CPU time while nothing changed, in seconds.
    pub idle_cpu_s: f64,
}

impl Scale {
    /// Runs it on an otherwise idle control plane.
    ///
    /// # Panics
    /// When it does not finish within twenty minutes.
    pub fn run(self, stand: &Stand) -> ScaleReport {
        let Self {
            deployments,
            nodes,
            foreign_pods,
            ..
        } = self;
        stand.make_namespace("hearth-system");
        stand.make_namespace("scale");
        for node in 0..nodes {
            stand.make_node(&format!("node-{node:03}"), 32, 64 << 30, &[]);
        }
        make_foreign(stand, foreign_pods, nodes);
        let proxy = stand.proxy();
        let mut operator = Operator::start(proxy.address, "hearth-system", &["--resync", "10m"]);
        let metrics = operator.metrics_address();
        let cpu_before = operator.cpu_seconds();
        let began = Instant::now();
        make_all(stand, deployments);
        let mut planned = None;
        loop {
            assert!(
                began.elapsed() < Duration::from_secs(1200),
                "{} writes in 20 minutes: {}",
                proxy.write_count(),
                operator.log()
            );
            assert!(operator.ended().is_none(), "{}", operator.log());
            std::thread::sleep(Duration::from_millis(200));
            let pods = count(stand, "/api/v1/namespaces/scale/pods");
            if planned.is_none() && pods >= deployments * 3 {
                planned = Some(began.elapsed());
            }
            if planned.is_some() && ready(stand) == deployments {
                break;
            }
        }
        let ready = began.elapsed();
        let cpu_s = operator.cpu_seconds() - cpu_before;
        let scraped = Metrics::of(&format!("http://{metrics}"));
        // Echoes of the last writes do not count as idle.
        std::thread::sleep(Duration::from_secs(3));
        let writes = proxy.writes();
        let idle_cpu = operator.cpu_seconds();
        std::thread::sleep(self.idle);
        let (now, most) = operator.resident_kib();
        let mib = |kib: u64| kib as f64 / 1024.0;
        let mut by_kind = BTreeMap::new();
        for write in &writes {
            *by_kind
                .entry(kind(write.method.as_str(), &write.path))
                .or_default() += 1;
        }
        ScaleReport {
            scale: self,
            planned: planned.unwrap_or(ready),
            ready,
            reconciles: scraped.count("hearth_operator_reconciles_total") as u64,
            reconcile_ms: (
                1e3 * scraped.quantile("hearth_operator_reconcile_seconds", 0.5),
                1e3 * scraped.quantile("hearth_operator_reconcile_seconds", 0.99),
            ),
            resident_mib: (mib(now), mib(most)),
            cpu_s,
            idle_writes: proxy.write_count() - writes.len(),
            writes: by_kind,
            idle_cpu_s: operator.cpu_seconds() - idle_cpu,
        }
    }
}

impl ScaleReport {
    /// Returns the number of writes per deployment.
    pub fn writes_per_deployment(&self) -> f64 {
        self.writes.values().sum::<usize>() as f64 / self.scale.deployments as f64
    }
}

impl fmt::Display for ScaleReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scale {
            deployments,
            nodes,
            foreign_pods,
            idle,
        } = self.scale;
        writeln!(
            f,
            "{deployments} deployments on {nodes} nodes beside {foreign_pods} foreign Pods"
        )?;
        writeln!(
            f,
            "  all planned, Pods exist   {:.1} s",
            self.planned.as_secs_f64()
        )?;
        writeln!(
            f,
            "  all ready                 {:.1} s",
            self.ready.as_secs_f64()
        )?;
        let (p50, p99) = self.reconcile_ms;
        writeln!(
            f,
            "  reconciles                {}, p50 ≤ {p50:.0} ms, p99 ≤ {p99:.0} ms",
            self.reconciles
        )?;
        let (now, most) = self.resident_mib;
        writeln!(
            f,
            "  resident                  {now:.1} MiB, at most {most:.1} MiB"
        )?;
        writeln!(f, "  processor                 {:.1} s", self.cpu_s)?;
        writeln!(
            f,
            "  writes per deployment     {:.2}",
            self.writes_per_deployment()
        )?;
        for (kind, count) in &self.writes {
            let each = *count as f64 / deployments as f64;
            writeln!(f, "    {kind:<44} {each:.2}")?;
        }
        write!(
            f,
            "  idle for {} s            {} writes, {:.2} s of processor",
            idle.as_secs(),
            self.idle_writes,
            self.idle_cpu_s
        )
    }
}

/// Creates Pods as other users run them: some containers with names, requests and an environment, in ten namespaces.
fn make_foreign(stand: &Stand, count: usize, nodes: usize) {
    for team in 0..10.min(count) {
        stand.make_namespace(&format!("team-{team}"));
    }
    let client = stand.client();
    let made = futures::stream::iter(0..count).map(|index| {
        let namespace = format!("team-{}", index % 10);
        let variables: Vec<Value> = (0..20)
            .map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of usual length"}))
            .collect();
        let container = |name: &str| {
            json!({"name": name, "image": "registry.lan/team/service:1", "env": variables,
                "resources": {"requests": {"cpu": "5m", "memory": "16Mi"}}})
        };
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("service-6d4b75cb6d-{index:05}"), "namespace": namespace,
                         "labels": {"app": "service", "pod-template-hash": "6d4b75cb6d"}},
            "spec": {"nodeName": format!("node-{:03}", index % nodes.max(1)),
                     "containers": [container("service"), container("proxy")]},
        });
        async move {
            let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods"))
                .header("content-type", "application/json")
                .body(pod.to_string().into_bytes());
            let request = request.unwrap_or_else(|error| panic!("{error}"));
            let answer = client.request_text(request).await;
            answer.unwrap_or_else(|error| panic!("{error}"));
        }
    });
    stand.block_on(made.buffer_unordered(8).collect::<Vec<()>>());
}

fn make_all(stand: &Stand, deployments: usize) {
    let spec = json!({
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": 2048},
        "prefill": {"replicas": 1}, "decode": {"replicas": 1},
    });
    let path = "/apis/hearth.dev/v1alpha1/namespaces/scale/inferencedeployments";
    let client = stand.client();
    let made = futures::stream::iter(0..deployments).map(|index| {
        let object = json!({
            "apiVersion": "hearth.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": format!("demo-{index:04}"), "namespace": "scale"}, "spec": spec,
        });
        async move {
            let request = http::Request::post(path)
                .header("content-type", "application/json")
                .body(object.to_string().into_bytes());
            let request = request.unwrap_or_else(|error| panic!("{error}"));
            let answer = client.request_text(request).await;
            answer.unwrap_or_else(|error| panic!("{error}"));
        }
    });
    stand.block_on(made.buffer_unordered(8).collect::<Vec<()>>());
}

fn count(stand: &Stand, path: &str) -> usize {
    // One item, and the number of remaining ones.
    let page = stand.try_get(&format!("{path}?limit=1"));
    let page = page.unwrap_or_default();
    let more = page["metadata"]["remainingItemCount"].as_u64().unwrap_or(0);
    page["items"].as_array().map_or(0, Vec::len) + usize::try_from(more).unwrap_or(0)
}

fn ready(stand: &Stand) -> usize {
    let path = "/apis/hearth.dev/v1alpha1/namespaces/scale/inferencedeployments";
    let list = stand.try_get(path).unwrap_or_default();
    let items = list["items"].as_array().map_or(&[][..], Vec::as_slice);
    items
        .iter()
        .filter(|item: &&Value| is_settled(item))
        .count()
}

/// Returns the method and resource of a path, such as `PATCH inferencedeployments/status`.
fn kind(method: &str, path: &str) -> String {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let skip = if parts.first() == Some(&"api") { 2 } else { 3 };
    let mut parts = parts.into_iter().skip(skip).peekable();
    if parts.peek() == Some(&"namespaces") {
        parts.next();
        parts.next();
    }
    let resource = parts.next().unwrap_or_default();
    parts.next();
    match parts.next() {
        Some(subresource) => format!("{method} {resource}/{subresource}"),
        None => format!("{method} {resource}"),
    }
}
