//! `kubectl hearth models`: the deployments' models, where they are, and how far a fetch is.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use hearth_crds::{InferenceDeployment, InferencePlanSpec, NodeModel, NodeProfileStatus, PlanRole};
use jiff::Timestamp;
use serde::Serialize;

use super::access::{Access, Listed, ScopeArgs, or_dash, placed};
use super::held::{OnNode, on_nodes, state};
use crate::terminal::table::OutputFormat;
use crate::terminal::ui::bytes;

const EXAMPLES: &str = "Examples:\n  kubectl hearth models\n  kubectl hearth models -A -o json";

/// Arguments of `kubectl hearth models`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ModelsArgs {
    #[command(flatten)]
    scope: ScopeArgs,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// The model of a deployment.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Model {
    namespace: String,
    deployment: String,
    model: Option<String>,
    source: Option<String>,
    /// Nodes that have its files; empty: every node, or none is known yet.
    nodes: Vec<String>,
    /// What nodes say that they have of it, or fetch; unset if they do not name it: it is not fetched, or one namespace alone may
    /// have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<Vec<OnNode>>,
    /// Nodes whose workers compute with it.
    used_on: Vec<String>,
    bytes: Option<u64>,
    percent: Option<u32>,
    /// `ready`, how far its fetch is, why it is not there, or why nothing is known of its plan.
    progress: String,
}

/// Prints the models. Exit code 1 if there is no deployment.
pub(super) async fn run(args: &ModelsArgs, access: &Access) -> anyhow::Result<ExitCode> {
    let mut all = Vec::new();
    let deployments = access.deployments(args.scope).await?;
    let profiles = match &*deployments {
        [] => BTreeMap::new(),
        _ => access.profiles().await?,
    };
    for listed in deployments {
        let Ok(deployment) = &listed.read else {
            continue;
        };
        let plan = access.plan_as_read(deployment, &listed.key.namespace);
        let plan = plan.await?;
        let plan = plan.as_ref().map(|plan| plan.as_ref().map(|it| &it.spec));
        all.push(Model::of(&listed, deployment, plan, &profiles));
    }
    if all.is_empty() && args.output == OutputFormat::Table {
        access.say_none(args.scope);
    } else {
        args.output.print(&all, || rows(args.scope, &all))?;
    }
    Ok(if all.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

impl Model {
    fn of(
        listed: &Listed,
        deployment: &InferenceDeployment,
        plan: Result<Option<&InferencePlanSpec>, &String>,
        profiles: &BTreeMap<String, NodeProfileStatus>,
    ) -> Self {
        let (plan, unreadable) = match plan {
            Ok(plan) => (plan, None),
            Err(why) => (None, Some(why)),
        };
        let status = deployment.status.as_ref();
        let model = status.and_then(|status| status.model.as_ref());
        let ranks = plan.into_iter().flat_map(|plan| &plan.ranks);
        let workers = ranks.filter(|rank| rank.role != PlanRole::Gateway);
        let mut used_on: Vec<String> = workers.map(|rank| rank.node.clone()).collect();
        used_on.sort_unstable();
        used_on.dedup();
        let inputs = plan.and_then(|plan| plan.inputs.as_ref());
        let weights = plan.map(|plan| plan.model.weight_bytes);
        let of_plan = inputs.map_or_else(Vec::new, |inputs| inputs.model_nodes.clone());
        let source = &deployment.spec.model.source;
        let stored = on_nodes(source, &listed.key.namespace, profiles);
        let nodes = stored.as_ref().map_or_else(
            || of_plan.clone(),
            |stored| nodes_with_it(stored, &of_plan, profiles),
        );
        Self {
            namespace: listed.key.namespace.to_string(),
            deployment: listed.key.name.to_string(),
            model: model.map(|model| model.served_name.clone()),
            source: plan.map(|plan| plan.model.source.clone()),
            nodes,
            stored,
            used_on,
            bytes: model.and_then(|model| model.total_bytes).or(weights),
            percent: model.and_then(|model| model.percent),
            progress: unreadable.map_or_else(|| progress(deployment), String::clone),
        }
    }
}

/// Nodes that have all of a model that profiles name: those that say so, and of a plan's nodes those that say nothing of it:
/// neither what their stores have, nor, with as many models as a profile names, whether this is one more.
fn nodes_with_it(
    stored: &[OnNode],
    of_plan: &[String],
    profiles: &BTreeMap<String, NodeProfileStatus>,
) -> Vec<String> {
    let whole = stored.iter().filter(|it| it.model.fetch.is_none());
    let is_silent = |node: &&String| {
        profiles
            .get(*node)
            .is_none_or(|profile| profile.store.is_none() || NodeModel::are_most(&profile.models))
    };
    let is_told = |node: &&String| stored.iter().any(|it| it.node == **node);
    let mut nodes: Vec<String> = whole.map(|it| it.node.clone()).collect();
    let silent = of_plan.iter().filter(is_silent);
    nodes.extend(silent.filter(|node| !is_told(node)).cloned());
    nodes.sort_unstable();
    nodes
}

/// How far the model is.
fn progress(deployment: &InferenceDeployment) -> String {
    let status = deployment.status.as_ref();
    let model = status.and_then(|status| status.model.as_ref());
    if let Some(fetch) = model.and_then(|model| model.fetch.clone()) {
        return fetch;
    }
    let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
    match conditions.find(|condition| condition.type_ == "ModelReady") {
        Some(ready) if ready.status == "True" => "ready".to_owned(),
        Some(ready) => ready.reason.clone(),
        None => "-".to_owned(),
    }
}

fn rows(scope: ScopeArgs, all: &[Model]) -> String {
    let header = [
        "NAME", "MODEL", "SOURCE", "ON", "USED ON", "SIZE", "PROGRESS",
    ];
    let now = Timestamp::now();
    let rows = all.iter().map(|one| {
        let on = match (&*one.nodes, &one.stored, one.source.is_some()) {
            ([], None, true) => "every node".to_owned(),
            (nodes, stored, _) => {
                let stored = stored.as_deref().unwrap_or_default();
                or_dash(Some(on(nodes, stored, now)))
            }
        };
        let row = [
            one.deployment.clone(),
            or_dash(one.model.clone()),
            or_dash(one.source.clone()),
            on,
            or_dash(Some(one.used_on.join(", "))),
            or_dash(one.bytes.map(bytes)),
            one.progress.clone(),
        ];
        (one.namespace.clone(), row)
    });
    placed(scope, header, rows)
}

/// Nodes, each with what it says: `attic (in use), shelf (43 %)`.
fn on(nodes: &[String], stored: &[OnNode], now: Timestamp) -> String {
    let silent = nodes
        .iter()
        .filter(|node| stored.iter().all(|it| it.node != **node));
    let told = stored
        .iter()
        .map(|it| format!("{} ({})", it.node, state(&it.model, now)));
    let mut words: Vec<String> = told.chain(silent.cloned()).collect();
    words.sort_unstable();
    words.join(", ")
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::key::Key;
    use hearth_controller_core::testing::{deployment, samples};
    use hearth_crds::{
        Condition, HuggingFaceSource, ModelSource, ModelStatus, NodeFetch, NodeStore,
    };

    use super::*;

    fn listed(read: InferenceDeployment) -> Listed {
        Listed {
            key: Key::new("team", "demo"),
            uid: "0b1c".to_owned(),
            created_s: None,
            read: Ok(read),
        }
    }

    #[test]
    fn a_fetch_is_told_until_the_model_is_ready() {
        let mut demo = deployment("");
        let status = demo.status.get_or_insert_default();
        status.model = Some(ModelStatus {
            served_name: "qwen3".to_owned(),
            downloaded_bytes: Some(1 << 20),
            total_bytes: Some(4 << 20),
            percent: Some(25),
            fetch: Some("25 %, 1 MiB/s, 3 s left".to_owned()),
        });
        let text = |demo: &InferenceDeployment| {
            let scope = ScopeArgs {
                all_namespaces: true,
            };
            let plan = samples::plan();
            rows(
                scope,
                &[Model::of(
                    &listed(demo.clone()),
                    demo,
                    Ok(Some(&plan)),
                    &BTreeMap::new(),
                )],
            )
        };
        let fetching = text(&demo);
        for words in ["team", "qwen3", "4 MiB", "25 %, 1 MiB/s, 3 s left"] {
            assert!(fetching.contains(words), "no {words} in {fetching}");
        }
        let status = demo.status.get_or_insert_default();
        if let Some(model) = &mut status.model {
            model.fetch = None;
        }
        status.conditions.push(Condition {
            type_: "ModelReady".to_owned(),
            status: "True".to_owned(),
            observed_generation: None,
            last_transition_time: String::new(),
            reason: "Present".to_owned(),
            message: String::new(),
        });
        assert!(text(&demo).ends_with("ready"), "{}", text(&demo));
    }

    #[test]
    fn nodes_say_what_they_have_of_a_model_and_plans_only_where_they_do_not() {
        let mut demo = deployment("");
        demo.spec.model.source = ModelSource {
            hugging_face: Some(HuggingFaceSource {
                repo: "a/b".to_owned(),
                revision: None,
                token_secret_ref: None,
            }),
            ..ModelSource::default()
        };
        let key = demo.spec.model.source.store_key("team").unwrap();
        let with = |fetch: Option<NodeFetch>| NodeProfileStatus {
            store: Some(NodeStore::default()),
            models: vec![NodeModel {
                key: key.clone(),
                in_use: fetch.is_none(),
                verified_at: Some(String::new()),
                fetch,
                ..NodeModel::default()
            }],
            ..NodeProfileStatus::default()
        };
        let half = NodeFetch {
            percent: Some(43),
            ..NodeFetch::default()
        };
        let empty = NodeProfileStatus {
            store: Some(NodeStore::default()),
            ..NodeProfileStatus::default()
        };
        let profiles = BTreeMap::from([
            ("attic".to_owned(), with(None)),
            ("shelf".to_owned(), with(Some(half))),
            ("cellar".to_owned(), empty),
            ("old".to_owned(), NodeProfileStatus::default()),
        ]);
        // It names others, as many as a profile can.
        let full = NodeProfileStatus {
            store: Some(NodeStore::default()),
            models: vec![NodeModel::default(); 32],
            ..NodeProfileStatus::default()
        };
        let profiles = BTreeMap::from_iter(profiles.into_iter().chain([("full".to_owned(), full)]));
        let mut plan = samples::plan();
        let inputs = plan.inputs.get_or_insert_default();
        inputs.model_nodes = ["cellar", "full", "old"].map(str::to_owned).to_vec();
        let model = Model::of(&listed(demo.clone()), &demo, Ok(Some(&plan)), &profiles);
        assert_eq!(model.nodes, ["attic", "full", "old"]);
        let scope = ScopeArgs {
            all_namespaces: true,
        };
        let text = rows(scope, &[model]);
        assert!(
            text.contains("attic (in use), full, old, shelf (43 %)"),
            "{text}"
        );
        let json =
            serde_json::to_value(Model::of(&listed(demo.clone()), &demo, Ok(None), &profiles));
        assert_eq!(json.unwrap()["stored"][1]["fetch"]["percent"], 43);
    }

    #[test]
    fn a_plan_that_cannot_be_read_is_a_line_that_says_so() {
        let demo = deployment("");
        let why = "plan demo-1 cannot be read by this version: no field ranks".to_owned();
        let model = Model::of(&listed(demo.clone()), &demo, Err(&why), &BTreeMap::new());
        let scope = ScopeArgs {
            all_namespaces: true,
        };
        let text = rows(scope, &[model]);
        assert!(text.contains("demo") && text.ends_with(&why), "{text}");
    }

    #[test]
    fn without_a_plan_nothing_is_said_of_nodes() {
        let demo = deployment("");
        let model = Model::of(&listed(demo.clone()), &demo, Ok(None), &BTreeMap::new());
        assert!(model.used_on.is_empty() && model.source.is_none());
        let scope = ScopeArgs {
            all_namespaces: false,
        };
        assert!(!rows(scope, &[model]).contains("every node"));
    }
}
