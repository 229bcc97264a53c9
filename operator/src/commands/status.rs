//! `hearth status`: the deployments that run on this machine, and their measured speed.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use hearth_crds::{InferencePlanSpec, PlanRing};
use serde::Serialize;
use serde_json::Value;

use crate::environment::Environment;
use crate::exposition::{TPOT, TTFT, total};
use crate::http;
use crate::terminal::table::{self, OutputFormat};
use crate::terminal::ui::{self, milliseconds};
use crate::up::state::StateArgs;
use crate::up::state::{Running, RunningProcess, StateDir, awaited};

const EXAMPLES: &str = "Examples:\n  hearth status\n  hearth status demo\n  hearth status -o json";
/// Longest time that an endpoint may take to respond.
const PATIENCE: Duration = Duration::from_secs(2);

/// Arguments of `hearth status`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StatusArgs {
    /// Show this deployment alone, with the state of each of its workers
    name: Option<String>,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
    #[command(flatten)]
    state: StateArgs,
}

/// A deployment as `-o json` prints it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(flatten)]
    running: Running,
    /// Whether the endpoint reports that it is ready, and no process hangs that answers need; `ready` is whether `hearth up` has
    /// reported so, too.
    serving: bool,
    /// Members of workers' groups that answers wait for.
    waits_for: Vec<String>,
    measured: Option<Measured>,
    predicted_ttft_ms: Option<f64>,
    predicted_tpot_ms: Option<f64>,
    #[serde(skip)]
    plan: Option<InferencePlanSpec>,
}

/// Means since the gateway started.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Measured {
    requests: u64,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
}

/// Prints the status. Exit code 1 if nothing runs.
pub(crate) fn run(args: &StatusArgs, environment: &Environment) -> anyhow::Result<ExitCode> {
    let state = StateDir::locate(args.state.state_dir.as_deref(), environment)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let of = |running: Running| {
        let plan = state.deployment(&running.name).read_plan().ok();
        runtime.block_on(inspect(running, plan))
    };
    if let Some(name) = &args.name {
        let status = of(state.choose(Some(name))?);
        let in_detail = || {
            let rows = rows(std::slice::from_ref(&status));
            format!("{rows}\n\n{}", workers(&status))
        };
        args.output.print(&as_printed(&status)?, in_detail)?;
        return Ok(ExitCode::SUCCESS);
    }
    let all: Vec<Status> = state.running()?.into_iter().map(of).collect();
    if all.is_empty() && args.output == OutputFormat::Table {
        ui::say(format_args!(
            "nothing runs on this machine; looked in {}\n  start something: hearth up -f manifests/examples/demo.yaml",
            state.path().display()
        ));
    } else {
        let printed: Vec<Value> = all.iter().map(as_printed).collect::<anyhow::Result<_>>()?;
        args.output.print(&printed, || rows_and_members(&all))?;
    }
    Ok(if all.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

async fn inspect(mut running: Running, plan: Option<InferencePlanSpec>) -> Status {
    let base = running.endpoint.trim_end_matches("/v1").to_owned();
    let client = http::client(&base, running.certificate.as_deref(), Some(PATIENCE));
    let (mut serving, mut waits_for, mut metrics) = (false, Vec::new(), None);
    if let Ok(client) = client
        && let Ok(ready) = client.get(format!("{base}/ready")).send().await
    {
        serving = ready.status().is_success();
        let body: Value = ready.json().await.unwrap_or_default();
        let members = http::waits_for(&body).map(|(_, member)| member);
        waits_for = members.map(str::to_owned).collect();
    }
    // A gateway hears of them some seconds later.
    let hung = hung_members(&running, plan.as_ref());
    serving &= hung.is_empty() && !is_gateway_hung(&running);
    waits_for.extend(hung);
    running.ready &= serving;
    if !running.ready {
        let members = members_of_ring(&running, plan.as_ref());
        waits_for.extend(awaited(members).map(str::to_owned));
    }
    waits_for.sort();
    waits_for.dedup();
    let url = running.metrics.as_deref();
    let client = url.map(|url| http::client(url, None, Some(PATIENCE)));
    if let (Some(url), Some(Ok(client))) = (url, client)
        && let Ok(response) = client.get(url).send().await
    {
        metrics = response.text().await.ok();
    }
    Status {
        running,
        serving,
        waits_for,
        measured: metrics.as_deref().map(measured),
        predicted_ttft_ms: plan.as_ref().map(|plan| plan.predicted.ttft_ms),
        predicted_tpot_ms: plan.as_ref().map(|plan| plan.predicted.tpot_ms),
        plan,
    }
}

/// Names of processes that answers of a deployment wait for, as its `hearth up` tells: a gateway cannot know them before its workers
/// have answered once.
pub(super) fn waits_by_up(state: &StateDir, name: &str) -> Vec<String> {
    let Ok(running) = state.choose(Some(name)) else {
        return Vec::new();
    };
    let plan = state.deployment(name).read_plan().ok();
    let mut waits_for = hung_members(&running, plan.as_ref());
    let members = members_of_ring(&running, plan.as_ref());
    waits_for.extend(awaited(members).map(str::to_owned));
    waits_for
}

/// Names of processes that hang and that no answer goes on without: members of rings, and the only decode workers.
fn hung_members(running: &Running, plan: Option<&InferencePlanSpec>) -> Vec<String> {
    let decode = || processes_of(running, "decode");
    let all_hang = decode().all(|process| process.hung);
    let decode = decode().filter(|_| all_hang);
    let stages = members_of_ring(running, plan).filter(|process| process.role != "decode");
    let hung = decode.chain(stages).filter(|process| process.hung);
    hung.map(|process| process.rank.clone()).collect()
}

/// Processes that are members of a ring.
fn members_of_ring<'r>(
    running: &'r Running,
    plan: Option<&'r InferencePlanSpec>,
) -> impl Iterator<Item = &'r RunningProcess> {
    let is_in_ring = move |process: &&RunningProcess| {
        let rank = plan.and_then(|plan| plan.rank(&process.rank));
        rank.is_some_and(|rank| rank.ring.is_some())
    };
    running.processes.iter().filter(is_in_ring)
}

fn measured(metrics: &str) -> Measured {
    let mean_ms = |histogram: &str| {
        let count = total(metrics, &format!("{histogram}_count"));
        (count > 0.0).then(|| total(metrics, &format!("{histogram}_sum")) / count * 1e3)
    };
    Measured {
        requests: total(metrics, "gen_ai_server_request_duration_seconds_count") as u64,
        ttft_ms: mean_ms(TTFT),
        tpot_ms: mean_ms(TPOT),
    }
}

fn rows(all: &[Status]) -> String {
    let header = [
        "NAME", "MODEL", "READY", "PLAN", "PREFILL", "DECODE", "STAGES", "RESTARTS", "TTFT",
        "TPOT", "REQUESTS", "AGE", "ENDPOINT",
    ];
    let rows = all.iter().map(|status| {
        let running = &status.running;
        let measured = status.measured.as_ref();
        let show = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), milliseconds);
        [
            running.name.clone(),
            running.served_name.clone(),
            ready(status),
            running.plan_generation.to_string(),
            pool(running, "prefill"),
            pool(running, "decode"),
            pool(running, "stage"),
            running
                .processes
                .iter()
                .map(|process| process.restarts)
                .sum::<u32>()
                .to_string(),
            show(measured.and_then(|measured| measured.ttft_ms)),
            show(measured.and_then(|measured| measured.tpot_ms)),
            measured.map_or_else(|| "-".to_owned(), |measured| measured.requests.to_string()),
            age(&running.started_at),
            running.endpoint.clone(),
        ]
    });
    table::plain(&header, rows)
}

/// The deployments, and the workers of those that do not serve and have a group: which of its members is missing.
fn rows_and_members(all: &[Status]) -> String {
    let mut parts = vec![rows(all)];
    let has_group = |plan: &InferencePlanSpec| plan.ranks.iter().any(|rank| rank.group().is_some());
    let starting = all.iter().filter(|status| {
        let plan = status.plan.as_ref();
        !status.running.ready && plan.is_some_and(has_group)
    });
    parts.extend(starting.map(|status| format!("{}:\n{}", status.running.name, workers(status))));
    parts.join("\n\n")
}

/// A deployment as `-o json` prints it: each process has its node, its layers and its state, as the table does.
fn as_printed(status: &Status) -> anyhow::Result<Value> {
    let mut printed = serde_json::to_value(status)?;
    let processes = printed["processes"].as_array_mut().into_iter().flatten();
    for (printed, process) in processes.zip(&status.running.processes) {
        let (node, layers) = place(status, process);
        printed["node"] = node.into();
        printed["layers"] = layers.into();
        printed["state"] = process.state().into();
    }
    Ok(printed)
}

/// Node and layers of a process by the plan.
fn place(status: &Status, process: &RunningProcess) -> (Option<String>, Option<String>) {
    let plan = status.plan.as_ref();
    let rank = plan.and_then(|plan| plan.rank(&process.rank));
    let ring = rank.and_then(|rank| rank.ring.as_ref());
    (
        rank.map(|rank| rank.node.clone()),
        ring.map(PlanRing::layers),
    )
}

/// Each process with its state.
fn workers(status: &Status) -> String {
    let rows = status.running.processes.iter().map(|process| {
        let (node, layers) = place(status, process);
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            process.rank.clone(),
            or_dash(node),
            or_dash(layers),
            process.state().to_owned(),
            process.restarts.to_string(),
            or_dash(process.pid.map(|pid| pid.to_string())),
        ]
    });
    let header = ["WORKER", "NODE", "LAYERS", "STATE", "RESTARTS", "PROCESS"];
    table::plain(&header, rows)
}

/// Readiness, with whom answers wait for, unless the gateway's process hangs.
fn ready(status: &Status) -> String {
    let is_hung = is_gateway_hung(&status.running);
    match (is_hung, status.running.ready, &*status.waits_for) {
        (true, ..) => "hung".to_owned(),
        (false, true, _) => "True".to_owned(),
        (false, false, []) => "False".to_owned(),
        (false, false, members) => format!("False: waits for {}", members.join(", ")),
    }
}

fn is_gateway_hung(running: &Running) -> bool {
    processes_of(running, "gateway").any(|process| process.hung)
}

fn pool(running: &Running, role: &str) -> String {
    let (ready, desired) = processes_of(running, role).fold((0, 0), |(ready, desired), process| {
        (ready + u32::from(process.ready), desired + 1)
    });
    let hung = processes_of(running, role)
        .filter(|process| process.hung)
        .count();
    match (desired, hung) {
        (0, _) => "-".to_owned(),
        (_, 0) => format!("{ready}/{desired}"),
        (_, 1) => format!("{ready}/{desired} hung"),
        (_, hung) => format!("{ready}/{desired} {hung} hung"),
    }
}

fn processes_of<'r>(
    running: &'r Running,
    role: &'r str,
) -> impl Iterator<Item = &'r RunningProcess> {
    let of_role = move |process: &&RunningProcess| process.role == role;
    running.processes.iter().filter(of_role)
}

/// Time since the start.
fn age(started_at: &str) -> String {
    let started = started_at.parse::<jiff::Timestamp>();
    started.map_or_else(
        |_| "-".to_owned(),
        |started| table::age(started.as_second()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_taken_over_all_labels() {
        let text = "# TYPE x histogram\n\
            gen_ai_server_time_to_first_token_seconds_sum{model=\"a\"} 1.5\n\
            gen_ai_server_time_to_first_token_seconds_count{model=\"a\"} 2\n\
            gen_ai_server_time_to_first_token_seconds_sum{model=\"b\"} 0.5\n\
            gen_ai_server_time_to_first_token_seconds_count{model=\"b\"} 2\n\
            gen_ai_server_request_duration_seconds_count 4\n";
        let measured = measured(text);
        assert_eq!(measured.ttft_ms, Some(500.0));
        assert_eq!(measured.tpot_ms, None);
        assert_eq!(measured.requests, 4);
    }
}
