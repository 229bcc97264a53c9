//! `kubectl hearth top`: what the deployments do now, from their gateways' metrics.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use hearth_controller_core::names::{LABEL_DEPLOYMENT, LABEL_ROLE, METRICS_PORT};
use hearth_crds::PlanRole;
use kube::api::{Api, ListParams};
use serde::Serialize;
use tokio::time::Instant;

use super::access::{Access, Listed, ScopeArgs, or_dash, placed};
use super::chat::is_open;
use super::forward::Forward;
use super::usage::{Counts, History, Usage, usage};
use crate::cluster::lean::{LeanPod, owner};
use crate::cluster::snapshot::list;
use crate::environment::Environment;
use crate::http;
use crate::terminal::table::OutputFormat;
use crate::terminal::ui::{self, milliseconds};

const EXAMPLES: &str = "Examples:\n  kubectl hearth top\n  kubectl hearth top -A --once -o json";
/// Time between two readings.
const EVERY: Duration = Duration::from_secs(2);
/// Longest time that a gateway may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Gateways that are read at the same time.
const CONCURRENCY: usize = 16;

/// Arguments of `kubectl hearth top`.
#[derive(Args)]
#[command(
    after_help = EXAMPLES,
    long_about = "Show requests, tokens per second, latencies and KV use by deployment\n\nOn a terminal the table is renewed every 2 seconds until Ctrl-C. Rates are of the last 30 seconds, and so are the means of TTFT and TPOT; where no answer came in that time, they are of all since the gateways started."
)]
pub(super) struct TopArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// Print once, after two readings; so it is where the output is no terminal
    #[arg(long)]
    once: bool,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// A deployment and what it does.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    namespace: String,
    name: String,
    /// Gateways that are ready.
    gateways: usize,
    /// Those of them that could be read.
    read: usize,
    #[serde(flatten)]
    usage: Usage,
}

/// What is known of the gateways, by uid of their Pods.
#[derive(Default)]
struct Meters {
    lines: HashMap<String, Arc<Line>>,
    histories: HashMap<String, History>,
}

/// The way to a gateway's metrics, kept open from one reading to the next.
struct Line {
    forward: Forward,
    client: reqwest::Client,
}

/// A gateway's Pod.
struct Gateway {
    uid: String,
    /// Uid of its deployment.
    owner: String,
    namespace: String,
    pod: String,
}

/// Prints what is measured. Exit code 1 if there is no deployment.
pub(super) async fn run(
    args: &TopArgs,
    access: &Access,
    environment: &Environment,
) -> anyhow::Result<ExitCode> {
    let is_screen = std::io::stdout().is_terminal() && environment.has_cursor;
    let is_live = is_screen && !args.once && args.output == OutputFormat::Table;
    let mut meters = Meters::default();
    let mut rows = meters.read(access, args.scope).await?;
    if rows.is_empty() {
        match args.output {
            OutputFormat::Table => access.say_none(args.scope),
            other => other.print(&rows, String::new)?,
        }
        return Ok(ExitCode::FAILURE);
    }
    if !is_live {
        tokio::time::sleep(EVERY).await;
        rows = meters.read(access, args.scope).await?;
        args.output.print(&rows, || table(args.scope, &rows))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut trouble = String::new();
    loop {
        let table = table(args.scope, &rows);
        ui::print_screen(&format!("{table}\n{trouble}"))?;
        tokio::time::sleep(EVERY).await;
        trouble.clear();
        match meters.read(access, args.scope).await {
            Ok(read) => rows = read,
            Err(error) => trouble = format!("\n{}\n", ui::sentence(&error)),
        }
    }
}

impl Meters {
    /// Reads all gateways once; one that cannot be read is left out and tried again the next time.
    async fn read(&mut self, access: &Access, scope: ScopeArgs) -> anyhow::Result<Vec<Row>> {
        let deployments = access.deployments(scope).await?;
        let gateways = gateways(access, scope).await?;
        let is_there = |uid: &String| gateways.iter().any(|gateway| gateway.uid == *uid);
        self.lines.retain(|uid, _| is_there(uid));
        self.histories.retain(|uid, _| is_there(uid));
        let reads = gateways.iter().map(|gateway| {
            let known = self.lines.get(&gateway.uid).cloned();
            async move { (gateway, scrape(access, gateway, known).await) }
        });
        let reads: Vec<_> = futures::stream::iter(reads)
            .buffer_unordered(CONCURRENCY)
            .collect()
            .await;
        let now = Instant::now();
        let mut failed = None;
        for (gateway, outcome) in reads {
            let uid = gateway.uid.clone();
            match outcome {
                Ok((line, text)) => {
                    self.lines.insert(uid.clone(), line);
                    let history = self.histories.entry(uid).or_default();
                    history.push(now, Counts::read(&text));
                }
                Err(error) => {
                    self.lines.remove(&uid);
                    self.histories.remove(&uid);
                    failed = Some(error);
                }
            }
        }
        // With none there is nothing to show, and most likely one reason.
        if let Some(error) = failed.filter(|_| self.histories.is_empty()) {
            return Err(error);
        }
        let rows = deployments.iter().map(|listed| self.row(listed, &gateways));
        Ok(rows.collect())
    }

    fn row(&self, listed: &Listed, gateways: &[Gateway]) -> Row {
        let own = gateways.iter().filter(|it| it.owner == listed.uid);
        let own: Vec<&Gateway> = own.collect();
        let histories = own.iter().filter_map(|it| self.histories.get(&it.uid));
        Row {
            namespace: listed.key.namespace.to_string(),
            name: listed.key.name.to_string(),
            gateways: own.len(),
            read: histories.clone().count(),
            usage: usage(histories),
        }
    }
}

/// The ready gateways.
async fn gateways(access: &Access, scope: ScopeArgs) -> anyhow::Result<Vec<Gateway>> {
    let api: Api<LeanPod> = match scope.all_namespaces {
        true => Api::all(access.client.clone()),
        false => access.api(),
    };
    let role = PlanRole::Gateway.as_str();
    let which = format!("{LABEL_DEPLOYMENT},{LABEL_ROLE}={role}");
    let found = list(&api, &ListParams::default().labels(&which)).await;
    let found = found.map_err(|failure| access.told("Pods", &failure))?;
    let gateways = found.into_iter().filter_map(|pod| {
        let owner = owner(&pod.metadata).to_owned();
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let view = pod.into_view();
        is_open(&view).then_some(Gateway {
            uid: view.uid,
            owner,
            namespace,
            pod: view.name,
        })
    });
    Ok(gateways.collect())
}

/// A gateway's metrics, by the way that is known, or a new one.
async fn scrape(
    access: &Access,
    gateway: &Gateway,
    known: Option<Arc<Line>>,
) -> anyhow::Result<(Arc<Line>, String)> {
    let line = match known {
        Some(line) => line,
        None => {
            let (namespace, pod) = (&gateway.namespace, &gateway.pod);
            let forward = Forward::open(access, namespace, pod, METRICS_PORT).await?;
            let client = http::client(&forward.base(), None, Some(PATIENCE))?;
            Arc::new(Line { forward, client })
        }
    };
    let url = format!("{}/metrics", line.forward.base());
    let silent = |error: reqwest::Error| {
        anyhow::anyhow!(
            "the gateway {} does not tell its metrics: {}\n  {} logs shows whether it is well",
            gateway.pod,
            crate::cluster::failure::chain(&error),
            access.program
        )
    };
    let response = line.client.get(url).send().await;
    let response = response.and_then(reqwest::Response::error_for_status);
    let text = response.map_err(silent)?.text().await.map_err(silent)?;
    Ok((line, text))
}

fn table(scope: ScopeArgs, rows: &[Row]) -> String {
    let header = [
        "NAME", "GATEWAYS", "RUNNING", "QUEUED", "TOKENS/S", "TTFT", "TPOT", "KV",
    ];
    let rows = rows.iter().map(|row| {
        let usage = &row.usage;
        let cells = [
            row.name.clone(),
            format!("{}/{}", row.read, row.gateways),
            or_dash(usage.running.map(|running| format!("{running:.0}"))),
            or_dash(usage.queued.map(|queued| format!("{queued:.0}"))),
            or_dash(usage.tokens_per_second.map(|rate| format!("{rate:.1}"))),
            or_dash(usage.ttft_ms.map(milliseconds)),
            or_dash(usage.tpot_ms.map(milliseconds)),
            or_dash(
                usage
                    .kv_usage
                    .map(|share| format!("{:.0} %", share * 100.0)),
            ),
        ];
        (row.namespace.clone(), cells)
    });
    placed(scope, header, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deployment_whose_gateway_is_not_read_has_no_figures() {
        let row = |read: usize| Row {
            namespace: "team".to_owned(),
            name: "demo".to_owned(),
            gateways: 1,
            read,
            usage: match read {
                0 => Usage::default(),
                _ => Usage {
                    running: Some(2.0),
                    queued: Some(0.0),
                    kv_usage: Some(0.125),
                    tokens_per_second: Some(41.25),
                    ..Usage::default()
                },
            },
        };
        let words = |read: usize| -> Vec<String> {
            let scope = ScopeArgs {
                all_namespaces: false,
            };
            let text = table(scope, &[row(read)]);
            let line = text.lines().nth(1).unwrap().to_owned();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(
            words(1),
            ["demo", "1/1", "2", "0", "41.2", "-", "-", "12", "%"]
        );
        assert_eq!(words(0), ["demo", "0/1", "-", "-", "-", "-", "-", "-"]);
        let value = serde_json::to_value(row(0)).unwrap();
        for field in ["running", "queued", "kvUsage", "tokensPerSecond"] {
            assert!(value[field].is_null(), "{value}");
        }
        assert_eq!(serde_json::to_value(row(1)).unwrap()["queued"], 0.0);
    }
}
