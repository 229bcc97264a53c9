//! `kubectl hearth plan`: the plan in force of a deployment, and how far its predictions are from what is measured.

use anyhow::anyhow;
use clap::Args;
use hearth_crds::{InferenceDeployment, InferencePlanSpec, LatencyStatus};
use serde::Serialize;

use super::access::{Access, or_dash};
use crate::terminal::table::{self, OutputFormat};
use crate::terminal::ui::milliseconds;

const EXAMPLES: &str = "Examples:\n  kubectl hearth plan demo --why\n  kubectl hearth plan demo -o yaml\n\n\
Of a deployment that is not in the cluster yet:\n  kubectl get nodeprofiles -o yaml | hearth plan -f demo.yaml --profiles -";

/// Arguments of `kubectl hearth plan`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PlanArgs {
    /// Which deployment
    name: String,
    /// Say why it is so, too, and what was not chosen
    #[arg(long)]
    why: bool,
    /// table, json or yaml
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// A plan as `-o json` prints it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown<'a> {
    #[serde(flatten)]
    plan: &'a InferencePlanSpec,
    /// Medians of the last minutes.
    measured: Option<&'a LatencyStatus>,
}

/// Prints the plan.
pub(super) async fn run(args: &PlanArgs, access: &Access) -> anyhow::Result<()> {
    let (listed, deployment) = access.deployment(&args.name).await?;
    let plan = access.plan(&deployment, &listed.key.namespace).await?;
    let plan = plan.ok_or_else(|| no_plan(&args.name, &deployment))?;
    let status = deployment.status.as_ref();
    let measured = status.and_then(|status| status.measured.as_ref());
    let plan = &plan.spec;
    let shown = Shown { plan, measured };
    args.output.print(&shown, || text(plan, measured, args.why))
}

fn no_plan(name: &str, deployment: &InferenceDeployment) -> anyhow::Error {
    let status = deployment.status.as_ref();
    let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
    match conditions.find(|condition| condition.type_ == "Planned") {
        Some(planned) if planned.status != "True" => {
            anyhow!(
                "{name} has no plan: {}\n  {}",
                planned.reason,
                planned.message
            )
        }
        _ => anyhow!(
            "{name} has no plan yet\n  is the operator up? kubectl -n hearth-system get pods"
        ),
    }
}

fn text(plan: &InferencePlanSpec, measured: Option<&LatencyStatus>, why: bool) -> String {
    let mut text = format!(
        "plan {}: {}\n\n{}\n\n{}\n",
        plan.generation,
        table::headline(plan),
        table::ranks(plan),
        latencies(plan, measured)
    );
    if why {
        text.push_str(&table::reasons(plan));
    }
    text
}

/// Predicted against measured latencies.
fn latencies(plan: &InferencePlanSpec, measured: Option<&LatencyStatus>) -> String {
    let ttft = measured.and_then(|it| it.time_to_first_token_milliseconds);
    let tpot = measured.and_then(|it| it.time_per_output_token_milliseconds);
    let predicted = &plan.predicted;
    let at = format!("at {} tokens", predicted.ttft_prompt_tokens);
    let rows = [
        ("TTFT", predicted.ttft_ms, at, ttft),
        ("TPOT", predicted.tpot_ms, "at batch 1".to_owned(), tpot),
    ];
    let rows = rows.into_iter().map(|(name, predicted, at, measured)| {
        [
            name.to_owned(),
            format!("{} {at}", milliseconds(predicted)),
            or_dash(measured.map(milliseconds)),
        ]
    });
    table::plain(&["LATENCY", "PREDICTED", "MEASURED"], rows)
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::{deployment, samples};

    use super::*;

    #[test]
    fn predictions_stand_beside_what_is_measured_and_reasons_come_when_asked() {
        let mut plan = samples::plan();
        plan.why = vec!["one node, no GPU".to_owned()];
        let measured = LatencyStatus {
            time_to_first_token_milliseconds: Some(12.0),
            time_per_output_token_milliseconds: None,
        };
        let plain = text(&plan, Some(&measured), false);
        let line = |name: &str| plain.lines().find(|line| line.trim().starts_with(name));
        assert!(line("TTFT").unwrap().ends_with("12 ms"), "{plain}");
        assert!(line("TPOT").unwrap().ends_with('-'), "{plain}");
        assert!(!plain.contains("one node, no GPU"));
        let explained = text(&plan, None, true);
        assert!(explained.contains("Why\n  one node, no GPU"), "{explained}");
    }

    #[test]
    fn where_there_is_no_plan_the_condition_says_why() {
        let mut demo = deployment("");
        let words = no_plan("demo", &demo).to_string();
        assert!(words.contains("no plan yet"), "{words}");
        let status = demo.status.get_or_insert_default();
        status.conditions.push(hearth_crds::Condition {
            type_: "Planned".to_owned(),
            status: "False".to_owned(),
            observed_generation: None,
            last_transition_time: String::new(),
            reason: "NoNodes".to_owned(),
            message: "no node is measured".to_owned(),
        });
        let words = no_plan("demo", &demo).to_string();
        assert!(words.contains("NoNodes") && words.contains("no node is measured"));
    }
}
