//! `kubectl hearth nodes`: the ledger by which plans are made: what each node has, who holds what of it, and what is free;
//! and the models that each node stores.

use std::collections::BTreeMap;

use clap::Args;
use hearth_controller_core::observed::{Holding, NodeView, Requests, Sight};
use hearth_crds::{GpuProfile, NodeModel, NodeStore, PlanRank, RankDevice};
use jiff::Timestamp;
use serde::Serialize;

use super::access::Access;
use super::held;
use crate::cluster::cache::State;
use crate::cluster::devices::Claimable;
use crate::cluster::snapshot::{Holder, Snapshot};
use crate::terminal::table::{self, OutputFormat};
use crate::terminal::ui::{self, bytes};

const EXAMPLES: &str = "Examples:\n  kubectl hearth nodes\n  kubectl hearth nodes office -o json";

/// Arguments of `kubectl hearth nodes`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct NodesArgs {
    /// Show this node alone
    name: Option<String>,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// A node, and what becomes of it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    node: String,
    ready: bool,
    cordoned: bool,
    /// What Pods may request of it in all.
    all: Amounts,
    /// Its GPUs, as they were measured.
    gpu_devices: Vec<Gpu>,
    /// What workers hold, and what is held for those that are yet to come.
    held: Vec<Held>,
    /// What all other Pods request; unset if they may not be listed.
    others: Option<Amounts>,
    free: Amounts,
    /// What its store has; unset if its agent does not say.
    store: Option<NodeStore>,
    /// Models that it has and fetches, without those that one namespace alone may have.
    models: Vec<NodeModel>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Amounts {
    memory_bytes: u64,
    cpu_millis: u64,
    /// GPUs that are given to one container alone.
    gpus: u32,
}

/// A GPU of a node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gpu {
    uuid: String,
    name: String,
    memory_bytes: u64,
}

/// What a worker holds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Held {
    namespace: String,
    deployment: String,
    /// Its rank, or two that share a Pod; unset: held for workers that are yet to come.
    worker: Option<String>,
    pod: Option<String>,
    #[serde(flatten)]
    amounts: Amounts,
    /// CPUs that it has for itself, by the kernel's number.
    exclusive_cpus: Vec<u32>,
    /// GPUs that it computes on, with its share of each one's memory.
    gpu_shares: Vec<GpuShare>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct GpuShare {
    uuid: String,
    /// Unset if only the claim is known.
    memory_bytes: Option<u64>,
    #[serde(skip)]
    shown: String,
}

/// Prints the ledger.
pub(super) async fn run(args: &NodesArgs, access: &Access) -> anyhow::Result<()> {
    let snapshot = match Snapshot::take(&access.client).await {
        Ok(snapshot) => snapshot,
        Err(failure) => {
            // The ledger is of the whole cluster: say which list is missing, as far as the API server does.
            let what = "nodes, and what is held of them,";
            return Err(access.told(what, &failure));
        }
    };
    for why in &snapshot.unseen {
        ui::say(format_args!("not all is counted: {why}"));
    }
    let mut nodes = nodes(&snapshot.state);
    if let Some(name) = &args.name {
        let names: Vec<String> = nodes.iter().map(|node| node.node.clone()).collect();
        nodes.retain(|node| node.node == *name);
        if nodes.is_empty() {
            anyhow::bail!("there is no node {name}\n  there are: {}", names.join(", "));
        }
    }
    if access.is_named {
        let is_there = |held: &Held| held.namespace == access.namespace;
        for node in &mut nodes {
            node.held.retain(is_there);
        }
    }
    args.output.print(&nodes, || {
        let models = models(&nodes, Timestamp::now());
        match &*models {
            "" => rows(&nodes),
            models => format!("{}\n\n{models}", rows(&nodes)),
        }
    })
}

fn nodes(state: &State) -> Vec<Node> {
    let holders = state.holders();
    let held = state.held_by_others("");
    let others = state.others();
    let claimable = state.devices().claimable();
    let none = Holding::default();
    let views = state.nodes.values();
    views
        .map(|view| {
            let on_it = holders.iter().filter(|holder| holder.node == view.name);
            let on_it: Vec<&Holder> = on_it.collect();
            let held = held.get(&view.name).unwrap_or(&none);
            let others = others.requests.get(&view.name).copied();
            let sums = Sums {
                all: all_of(view, &claimable),
                held: amounts(held),
                others: amounts_of(others.unwrap_or_default()),
                unclaimed: claimable.get(&view.name).map(|it| it.unclaimed),
            };
            let ours = on_it.iter().map(|holder| amounts(&holder.holding));
            let ours = ours.fold(Amounts::default(), Amounts::plus);
            let is_seen = state.ledger.sight() == Sight::All;
            let profile = state.profile(&view.name);
            Node {
                node: view.name.clone(),
                ready: view.is_ready,
                cordoned: view.is_cordoned,
                all: sums.all,
                gpu_devices: gpus(view).map(Gpu::of).collect(),
                held: on_it.into_iter().map(Held::of).collect(),
                others: is_seen.then(|| sums.others.plus(sums.held.minus(ours))),
                free: sums.free(),
                store: profile.and_then(|profile| profile.store),
                models: profile.map_or_else(Vec::new, |profile| profile.models.clone()),
            }
        })
        .collect()
}

/// What is known of a node in sums.
struct Sums {
    all: Amounts,
    /// Held by deployments, those among them that are gone and whose Pods still end.
    held: Amounts,
    others: Amounts,
    /// GPUs that a driver offers and nobody has claimed; `None`: they are requested by number.
    unclaimed: Option<u32>,
}

impl Sums {
    fn free(&self) -> Amounts {
        let mut free = self.all.minus(self.held).minus(self.others);
        if let Some(unclaimed) = self.unclaimed {
            free.gpus = free.gpus.min(unclaimed);
        }
        free
    }
}

impl Amounts {
    fn plus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_add(other.memory_bytes),
            cpu_millis: self.cpu_millis.saturating_add(other.cpu_millis),
            gpus: self.gpus.saturating_add(other.gpus),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            memory_bytes: self.memory_bytes.saturating_sub(other.memory_bytes),
            cpu_millis: self.cpu_millis.saturating_sub(other.cpu_millis),
            gpus: self.gpus.saturating_sub(other.gpus),
        }
    }
}

impl Gpu {
    fn of(profile: &GpuProfile) -> Self {
        Self {
            uuid: profile.uuid.clone(),
            name: profile.name.clone(),
            memory_bytes: profile.memory_bytes,
        }
    }
}

impl Held {
    fn of(holder: &Holder) -> Self {
        let ranks: Vec<&str> = holder.ranks.iter().map(|rank| rank.name.as_str()).collect();
        let worker = holder.pod.as_ref().map(|pod| match &*ranks {
            // Its plan is gone, or it reads a model's facts.
            [] => pod.clone(),
            ranks => ranks.join("+"),
        });
        Self {
            namespace: holder.deployment.namespace.to_string(),
            deployment: holder.deployment.name.to_string(),
            worker,
            pod: holder.pod.clone(),
            amounts: amounts(&holder.holding),
            exclusive_cpus: holder.holding.exclusive_cpus.clone(),
            gpu_shares: shares(holder),
        }
    }
}

fn gpus(view: &NodeView) -> impl Iterator<Item = &GpuProfile> {
    let profile = view.profile.iter();
    profile.flat_map(|profile| &profile.gpus)
}

/// What a node has for Pods. GPUs are requested by number from a device plugin, or claimed from a driver.
fn all_of(view: &NodeView, claimable: &BTreeMap<String, Claimable>) -> Amounts {
    let offered = claimable.get(&view.name).map_or(0, |it| it.offered);
    Amounts {
        memory_bytes: view.memory_bytes,
        cpu_millis: view.cpu_millis,
        gpus: view.gpus.max(offered),
    }
}

/// A claimed GPU is not requested by number as well.
fn amounts(holding: &Holding) -> Amounts {
    let claimed = u32::try_from(holding.claimed_gpus.len()).unwrap_or(u32::MAX);
    Amounts {
        memory_bytes: holding.memory_bytes,
        cpu_millis: holding.cpu_millis,
        gpus: holding.gpus.max(claimed),
    }
}

fn amounts_of(requests: Requests) -> Amounts {
    Amounts {
        memory_bytes: requests.memory_bytes,
        cpu_millis: requests.cpu_millis,
        gpus: requests.gpus,
    }
}

fn shares(holder: &Holder) -> Vec<GpuShare> {
    let on_gpu = |rank: &PlanRank| match rank.device() {
        RankDevice::Cpus => None,
        RankDevice::Gpu(uuid) => Some(GpuShare {
            uuid: uuid.to_owned(),
            memory_bytes: Some(rank.gpu_memory_bytes),
            shown: table::device(rank),
        }),
    };
    let mut shares: Vec<GpuShare> = holder.ranks.iter().filter_map(on_gpu).collect();
    for uuid in &holder.holding.claimed_gpus {
        if !shares.iter().any(|share| share.uuid == *uuid) {
            shares.push(GpuShare {
                uuid: uuid.clone(),
                memory_bytes: None,
                shown: uuid.clone(),
            });
        }
    }
    shares
}

fn rows(nodes: &[Node]) -> String {
    let row = |node: &str, holder: &str, worker: &str, amounts: Amounts, gpus: String| {
        [
            node.to_owned(),
            holder.to_owned(),
            worker.to_owned(),
            bytes(amounts.memory_bytes),
            cpus(amounts.cpu_millis),
            gpus,
        ]
    };
    let number = |amounts: Amounts| amounts.gpus.to_string();
    let mut rows = Vec::new();
    for node in nodes {
        let state = match (node.ready, node.cordoned) {
            (false, _) => " (not ready)",
            (true, true) => " (cordoned)",
            (true, false) => "",
        };
        let name = format!("{}{state}", node.node);
        let names: Vec<&str> = node.gpu_devices.iter().map(|gpu| &*gpu.name).collect();
        let gpus = match (&*names, node.all.gpus) {
            ([], gpus) => gpus.to_string(),
            (names, gpus) => format!("{gpus}: {}", names.join(", ")),
        };
        rows.push(row(&name, "all", "", node.all, gpus));
        for held in &node.held {
            let of = format!("{}/{}", held.namespace, held.deployment);
            let worker = held.worker.as_deref().unwrap_or("to come");
            let gpus: Vec<&str> = held.gpu_shares.iter().map(|it| &*it.shown).collect();
            let gpus = match &*gpus {
                [] => number(held.amounts),
                gpus => gpus.join(", "),
            };
            rows.push(row("", &of, worker, held.amounts, gpus));
        }
        if let Some(others) = node.others {
            rows.push(row("", "other Pods", "", others, number(others)));
        }
        rows.push(row("", "free", "", node.free, number(node.free)));
    }
    let header = ["NODE", "HOLDER", "WORKER", "MEMORY", "CPUS", "GPUS"];
    table::plain(&header, rows.into_iter())
}

/// The models that nodes store; empty if there are none.
fn models(nodes: &[Node], now: Timestamp) -> String {
    let of_node = |node: &Node| held::rows(&node.node, node.store, &node.models, now);
    let rows: Vec<[String; 5]> = nodes.iter().flat_map(of_node).collect();
    if rows.is_empty() {
        return String::new();
    }
    let header = ["NODE", "MODEL", "COMMIT", "SIZE", "STATE"];
    table::plain(&header, rows.into_iter())
}

/// Thousandths of a CPU as CPUs: `1.5`.
fn cpus(millis: u64) -> String {
    let text = format!("{}.{:03}", millis / 1000, millis % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(memory_bytes: u64, cpu_millis: u64, gpus: u32) -> Amounts {
        Amounts {
            memory_bytes,
            cpu_millis,
            gpus,
        }
    }

    #[test]
    fn cpus_are_told_without_empty_digits() {
        for (millis, text) in [
            (0, "0"),
            (1500, "1.5"),
            (2000, "2"),
            (20, "0.02"),
            (1005, "1.005"),
        ] {
            assert_eq!(cpus(millis), text);
        }
    }

    #[test]
    fn what_is_free_is_the_rest_and_never_less_than_nothing() {
        let sums = |unclaimed| Sums {
            all: amounts(10, 1000, 2),
            held: amounts(4, 200, 1),
            others: amounts(1, 900, 0),
            unclaimed,
        };
        assert_eq!(sums(None).free(), amounts(5, 0, 1));
        assert_eq!(sums(Some(0)).free(), amounts(5, 0, 0));
    }

    #[test]
    fn a_node_has_a_row_for_all_each_holder_and_what_is_free() {
        let node = Node {
            node: "office".to_owned(),
            ready: true,
            cordoned: true,
            all: amounts(8 << 30, 4000, 1),
            gpu_devices: vec![Gpu {
                uuid: "GPU-1".to_owned(),
                name: "RTX 3090".to_owned(),
                memory_bytes: 24 << 30,
            }],
            held: vec![Held {
                namespace: "team".to_owned(),
                deployment: "demo".to_owned(),
                worker: None,
                pod: None,
                amounts: amounts(1 << 30, 200, 0),
                exclusive_cpus: Vec::new(),
                gpu_shares: Vec::new(),
            }],
            others: None,
            free: amounts(7 << 30, 3800, 1),
            store: None,
            models: Vec::new(),
        };
        let nodes = [node];
        assert_eq!(models(&nodes, Timestamp::UNIX_EPOCH), "");
        let text = rows(&nodes);
        let line =
            |at: usize| -> Vec<&str> { text.lines().nth(at).unwrap().split_whitespace().collect() };
        assert_eq!(
            line(1),
            [
                "office",
                "(cordoned)",
                "all",
                "8",
                "GiB",
                "4",
                "1:",
                "RTX",
                "3090"
            ]
        );
        assert_eq!(line(2), ["team/demo", "to", "come", "1", "GiB", "0.2", "0"]);
        assert_eq!(line(3), ["free", "7", "GiB", "3.8", "1"]);
    }
}
