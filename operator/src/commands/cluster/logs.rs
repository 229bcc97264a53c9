//! `kubectl hearth logs`: the logs of a deployment's Pods, line by line, each with its rank.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use futures::AsyncBufReadExt;
use hearth_controller_core::names::ROLE_INSPECT;
use hearth_controller_core::observed::{PodRole, PodView};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, LogParams};
use tokio::task::JoinHandle;

use super::access::{Access, Listed, told};
use crate::cluster::failure::Failure;
use crate::commands::logs::prefixed;
use crate::terminal::ui;

const EXAMPLES: &str =
    "Examples:\n  kubectl hearth logs demo\n  kubectl hearth logs demo decode-0 --follow";
/// How often Pods are looked for that have come meanwhile.
const EVERY: Duration = Duration::from_secs(2);

/// Arguments of `kubectl hearth logs`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct LogsArgs {
    /// Which deployment
    name: String,
    /// Which worker, such as decode-0, or which Pod (default: all)
    worker: Option<String>,
    /// Keep printing as more is written, also by Pods that come later, until Ctrl-C
    #[arg(short, long)]
    follow: bool,
    /// Lines from the end of each log
    #[arg(long, value_name = "N", default_value_t = 100)]
    tail: u32,
}

/// Prints the logs.
pub(super) async fn run(args: &LogsArgs, access: &Access) -> anyhow::Result<()> {
    let (listed, _) = access.deployment(&args.name).await?;
    let all = access.pods(&listed).await?;
    let pods = chosen(&all, args.worker.as_deref());
    if pods.is_empty() && !args.follow {
        match (&args.worker, &*names(&all)) {
            (_, []) => bail!(
                "{} has no Pods\n  {} status {} tells why",
                args.name,
                access.program,
                args.name
            ),
            (worker, names) => bail!(
                "{} has no worker {}; it has {}",
                args.name,
                worker.as_deref().unwrap_or_default(),
                names.join(", ")
            ),
        }
    }
    if args.follow {
        if let (Some(worker), true) = (&args.worker, pods.is_empty()) {
            let names = names(&all).join(", ");
            ui::say(format_args!(
                "{} has no worker {worker} yet; it has {names}",
                args.name
            ));
        }
        return follow(args, access, &listed).await;
    }
    let api: Api<Pod> = Api::namespaced(access.client.clone(), &listed.key.namespace);
    let mut unread = 0;
    for pod in &pods {
        let which = which(pod, false, Begin::Tail(args.tail));
        match print(&api, pod, &which).await? {
            Ok(()) => {}
            // Its container does not run yet.
            Err(Failure::Invalid(why)) => {
                ui::say(format_args!("{} has no log yet: {why}", pod.name))
            }
            Err(other) => {
                ui::print_error(&access.told("Logs", &other));
                unread += 1;
            }
        }
    }
    match unread {
        0 => Ok(()),
        unread => bail!("logs of {unread} of {} Pods could not be read", pods.len()),
    }
}

/// Where a log is read from.
enum Begin {
    /// So many lines before its end.
    Tail(u32),
    /// What was written since.
    Since(Timestamp),
    /// Its first line.
    First,
}

/// The API server takes whole seconds: rather a line twice than none.
const MARGIN: SignedDuration = SignedDuration::from_secs(1);

/// Follows all Pods, and those that come later; a log that ends with its container is taken up again with the next one.
async fn follow(args: &LogsArgs, access: &Access, of: &Listed) -> anyhow::Result<()> {
    let api: Api<Pod> = Api::namespaced(access.client.clone(), &of.key.namespace);
    // By uid; each tells when it ended.
    let mut logs: HashMap<String, JoinHandle<Timestamp>> = HashMap::new();
    let mut is_first = true;
    let (sender, mut refused) = tokio::sync::mpsc::unbounded_channel::<anyhow::Error>();
    loop {
        if let Ok(error) = refused.try_recv() {
            return Err(error);
        }
        let pods = access.pods(of).await?;
        for pod in chosen(&pods, args.worker.as_deref()) {
            if logs.get(&pod.uid).is_some_and(|task| !task.is_finished()) {
                continue;
            }
            let ended = match logs.remove(&pod.uid) {
                Some(task) => task.await.ok(),
                None => None,
            };
            let begin = match ended {
                Some(ended) => Begin::Since(ended - MARGIN),
                None if is_first => Begin::Tail(args.tail),
                None => Begin::First,
            };
            let (api, pod, which) = (api.clone(), pod.clone(), which(pod, true, begin));
            let uid = pod.uid.clone();
            let (sender, address) = (sender.clone(), access.address.clone());
            let task = async move {
                // A container that does not run yet is asked again, and so is a server that is away for a moment.
                let refused = match print(&api, &pod, &which).await {
                    Ok(Err(failure @ Failure::Forbidden(_))) => {
                        Some(told("Logs", &address, &failure))
                    }
                    Ok(_) => None,
                    Err(error) => Some(error),
                };
                // Whoever listened has ended with the first one.
                refused
                    .into_iter()
                    .for_each(|error| drop(sender.send(error)));
                Timestamp::now()
            };
            logs.insert(uid, tokio::spawn(task));
        }
        is_first = false;
        tokio::time::sleep(EVERY).await;
    }
}

/// Prints a log.
///
/// # Errors
/// That of standard output; within, that of the API server.
async fn print(
    api: &Api<Pod>,
    pod: &PodView,
    which: &LogParams,
) -> anyhow::Result<Result<(), Failure>> {
    let stream = match api.log_stream(&pod.name, which).await {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error.into())),
    };
    let mut stream = std::pin::pin!(stream);
    let rank = shown(pod);
    let mut line = Vec::new();
    loop {
        line.clear();
        match stream.read_until(b'\n', &mut line).await {
            Ok(0) => return Ok(Ok(())),
            Ok(_) => {}
            Err(error) => return Ok(Err(Failure::Network(error.to_string()))),
        }
        let text = String::from_utf8_lossy(&line);
        ui::print_data(&prefixed(&rank, text.trim_end_matches('\n')))?;
    }
}

fn which(pod: &PodView, follow: bool, begin: Begin) -> LogParams {
    // A mesh may have put containers of its own beside it.
    let container = match pod.role {
        PodRole::Rank(role) => Some(role.as_str().to_owned()),
        PodRole::Inspect => Some(ROLE_INSPECT.to_owned()),
        PodRole::Other => None,
    };
    let mut which = LogParams {
        container,
        follow,
        ..LogParams::default()
    };
    match begin {
        Begin::Tail(lines) => which.tail_lines = Some(i64::from(lines)),
        Begin::Since(time) => which.since_time = Some(time),
        Begin::First => {}
    }
    which
}

fn chosen<'a>(pods: &'a [PodView], worker: Option<&str>) -> Vec<&'a PodView> {
    let is_meant =
        |pod: &&PodView| worker.is_none_or(|worker| pod.has_rank(worker) || pod.name == worker);
    pods.iter().filter(is_meant).collect()
}

fn names(pods: &[PodView]) -> Vec<String> {
    let ranks = pods.iter().flat_map(PodView::ranks);
    let mut names: Vec<String> = ranks.map(|(rank, _)| rank.to_owned()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The ranks of a Pod, or its role where it has none.
fn shown(pod: &PodView) -> String {
    let ranks: Vec<&str> = pod.ranks().map(|(rank, _)| rank).collect();
    match &*ranks {
        [] => ROLE_INSPECT.to_owned(),
        ranks => ranks.join("+"),
    }
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::observed::SecondRank;
    use hearth_crds::PlanRole;

    use super::*;

    fn pod(name: &str, rank: &str, role: PlanRole) -> PodView {
        PodView {
            name: name.to_owned(),
            rank: rank.to_owned(),
            role: PodRole::Rank(role),
            ..PodView::default()
        }
    }

    #[test]
    fn a_worker_is_chosen_by_its_rank_or_its_pod() {
        let mut both = pod("demo-decode-0-a", "decode-0", PlanRole::Decode);
        both.second = Some(SecondRank {
            rank: "prefill-0".to_owned(),
            role: PlanRole::Prefill,
        });
        let pods = [
            both,
            pod("demo-gateway-0-b", "gateway-0", PlanRole::Gateway),
        ];
        let count = |worker: Option<&str>| chosen(&pods, worker).len();
        assert_eq!(count(None), 2);
        for worker in ["decode-0", "prefill-0", "demo-gateway-0-b"] {
            assert_eq!(count(Some(worker)), 1, "{worker}");
        }
        assert_eq!(count(Some("decode-1")), 0);
        assert_eq!(names(&pods), ["decode-0", "gateway-0", "prefill-0"]);
        assert_eq!(shown(&pods[0]), "decode-0+prefill-0");
    }

    #[test]
    fn the_container_is_the_workers_own() {
        let gateway = pod("demo-gateway-0-b", "gateway-0", PlanRole::Gateway);
        let which = which(&gateway, true, Begin::Tail(7));
        assert_eq!(which.container.as_deref(), Some("gateway"));
        assert_eq!((which.tail_lines, which.follow), (Some(7), true));
    }
}
