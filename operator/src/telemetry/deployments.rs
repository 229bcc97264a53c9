//! What is exported of each deployment: its state as last reported, and counts of what was decided about it.
//!
//! Every series has the labels `namespace` and `name` of its deployment, and goes with it. All other labels have a few values
//! each: types of conditions, pools, directions.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hearth_controller_core::key::Key;
use hearth_controller_core::plan_record::has_failed;
use hearth_crds::{
    DurationText, InferenceDeploymentSpec, InferenceDeploymentStatus, InferencePlan, PlanRole,
};
use jiff::Timestamp;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::series::{Family, Kind, Sink};

/// Figures of all deployments that this replica reconciles.
#[derive(Clone, Debug, Default)]
pub(crate) struct Deployments(Arc<Mutex<BTreeMap<Key, Figures>>>);

#[derive(Debug, Default)]
struct Figures {
    state: State,
    /// End of the certificate's validity, in seconds since 1970.
    certificate_s: Option<i64>,
    failures: u64,
    plans: Plans,
}

/// What the last status and the spec say.
#[derive(Debug, Default)]
struct State {
    /// Types of conditions, and whether each is True.
    conditions: Box<[(Box<str>, bool)]>,
    pools: Box<[Pool]>,
    plan_generation: Option<u64>,
    is_suspended: bool,
    is_at_zero: bool,
    first_token_s: Option<f64>,
    per_token_s: Option<f64>,
}

#[derive(Debug)]
struct Pool {
    name: Box<str>,
    wanted: u32,
    ready: u32,
}

/// What was seen of a deployment's plans. They are counted when they are seen, not when they are written: a write whose answer was
/// lost counts too, and one that is repeated counts once.
#[derive(Debug, Default)]
struct Plans {
    /// The newest plan; `None` before the first look.
    newest: Option<Newest>,
    /// Generation of the newest plan that has failed.
    failed: u64,
    made: u64,
    replaced: u64,
    failures: u64,
    /// Number of times that a plan had more workers of a role than the one before.
    up: [u64; SCALED.len()],
    /// The same for fewer.
    down: [u64; SCALED.len()],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Newest {
    /// 0: there is none.
    generation: u64,
    workers: [usize; SCALED.len()],
}

/// Roles whose number is decided.
const SCALED: [PlanRole; 3] = [PlanRole::Gateway, PlanRole::Prefill, PlanRole::Decode];

impl Deployments {
    /// Records the status as it was reported, and the spec, if that could be read.
    pub(crate) fn reported(
        &self,
        key: &Key,
        spec: Option<&InferenceDeploymentSpec>,
        status: &InferenceDeploymentStatus,
    ) {
        let objectives = spec.map(|spec| &spec.objectives);
        let seconds = |text: DurationText| text.get().as_secs_f64();
        let conditions = status.conditions.iter();
        let pools = status.pool_statuses.iter();
        let state = State {
            conditions: conditions
                .map(|condition| (condition.type_.as_str().into(), condition.status == "True"))
                .collect(),
            pools: pools
                .map(|pool| Pool {
                    name: pool.name.as_str().into(),
                    wanted: pool.desired,
                    ready: pool.ready,
                })
                .collect(),
            plan_generation: status.plan.as_ref().map(|plan| plan.generation),
            is_suspended: spec.is_some_and(|spec| spec.suspend),
            is_at_zero: status.is_at_zero(),
            first_token_s: objectives
                .and_then(|it| it.time_to_first_token)
                .map(seconds),
            per_token_s: objectives
                .and_then(|it| it.time_per_output_token)
                .map(seconds),
        };
        self.lock().entry(key.clone()).or_default().state = state;
    }

    /// Records until when a deployment's certificate is valid.
    pub(crate) fn certified(&self, key: &Key, until: Timestamp) {
        let mut all = self.lock();
        all.entry(key.clone()).or_default().certificate_s = Some(until.as_second());
    }

    /// Counts what is new in a deployment's plans, oldest first.
    pub(crate) fn planned(&self, key: &Key, plans: &[Arc<InferencePlan>]) {
        self.lock()
            .entry(key.clone())
            .or_default()
            .plans
            .see(plans.iter().map(|plan| &**plan));
    }

    /// Counts a reconcile that failed.
    pub(crate) fn failed(&self, key: &Key) {
        self.lock().entry(key.clone()).or_default().failures += 1;
    }

    /// Ends the series of a deployment.
    pub(crate) fn forget(&self, key: &Key) {
        self.lock().remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Figures>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Plans {
    fn see<'a>(&mut self, plans: impl Iterator<Item = &'a InferencePlan> + Clone) {
        let failed = plans.clone().filter(|plan| has_failed(plan));
        let failed = failed.map(|plan| plan.spec.generation);
        let last = plans.last().map_or_else(Newest::default, Newest::of);
        let Some(before) = self.newest else {
            // What was there before this process is not its doing.
            self.failed = failed.max().unwrap_or(0);
            self.newest = Some(last);
            return;
        };
        let (mut newly_failed, mut newest_failed) = (0, self.failed);
        for generation in failed.filter(|generation| *generation > self.failed) {
            newly_failed += 1;
            newest_failed = newest_failed.max(generation);
        }
        self.failures += newly_failed;
        self.failed = newest_failed;
        if last.generation <= before.generation {
            return;
        }
        self.made += last.generation - before.generation;
        if before.generation > 0 {
            self.replaced += last.generation - before.generation;
            for (index, now) in last.workers.iter().enumerate() {
                self.up[index] += u64::from(*now > before.workers[index]);
                self.down[index] += u64::from(*now < before.workers[index]);
            }
        }
        self.newest = Some(last);
    }
}

impl Newest {
    fn of(plan: &InferencePlan) -> Self {
        Self {
            generation: plan.spec.generation,
            workers: SCALED.map(|role| plan.spec.ranks_of(role).count()),
        }
    }
}

impl Collector for Deployments {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let all = self.lock();
        for family in FAMILIES.iter().chain(COUNTERS) {
            let items = all.iter().map(|(key, figures)| {
                let labels = [("namespace", &*key.namespace), ("name", &*key.name)];
                (labels, figures)
            });
            family.encode(&mut encoder, items)?;
        }
        Ok(())
    }
}

const FAMILIES: &[Family<Figures>] = &[
    Family {
        name: "hearth_deployment_condition",
        help: "1 if the condition of this type is True, 0 if it is False or Unknown",
        kind: Kind::Gauge,
        series: |it, sink| {
            let mut conditions = it.state.conditions.iter();
            conditions.try_for_each(|(type_, holds)| sink.put_flag(&[("type", type_)], *holds))
        },
    },
    Family {
        name: "hearth_deployment_pool_wanted",
        help: "Pods that the plan has in the pool; without a plan, those that the spec asks for",
        kind: Kind::Gauge,
        series: |it, sink| each_pool(it, sink, |pool| pool.wanted),
    },
    Family {
        name: "hearth_deployment_pool_ready",
        help: "Pods of the pool that are wanted and ready",
        kind: Kind::Gauge,
        series: |it, sink| each_pool(it, sink, |pool| pool.ready),
    },
    Family {
        name: "hearth_deployment_plan_generation",
        help: "Generation of the plan in force",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_some(it.state.plan_generation.map(|number| number as f64)),
    },
    Family {
        name: "hearth_deployment_suspended",
        help: "1 while spec.suspend is true",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_flag(&[], it.state.is_suspended),
    },
    Family {
        name: "hearth_deployment_at_zero",
        help: "1 while all workers have ended for want of requests",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_flag(&[], it.state.is_at_zero),
    },
    Family {
        name: "hearth_deployment_objective_time_to_first_token_seconds",
        help: "spec.objectives.timeToFirstToken",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_some(it.state.first_token_s),
    },
    Family {
        name: "hearth_deployment_objective_time_per_output_token_seconds",
        help: "spec.objectives.timePerOutputToken",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_some(it.state.per_token_s),
    },
    Family {
        name: "hearth_deployment_certificate_expiry_timestamp_seconds",
        help: "End of the validity of the deployment's certificate, in seconds since 1970",
        kind: Kind::Gauge,
        series: |it, sink| sink.put_some(it.certificate_s.map(|seconds| seconds as f64)),
    },
];

const COUNTERS: &[Family<Figures>] = &[
    Family {
        name: "hearth_deployment_plans_made",
        help: "Plans made",
        kind: Kind::Counter,
        series: |it, sink| sink.put(&[], it.plans.made as f64),
    },
    Family {
        name: "hearth_deployment_plans_replaced",
        help: "Plans that another one followed",
        kind: Kind::Counter,
        series: |it, sink| sink.put(&[], it.plans.replaced as f64),
    },
    Family {
        name: "hearth_deployment_plans_failed",
        help: "Plans given up because their workers did not become ready",
        kind: Kind::Counter,
        series: |it, sink| sink.put(&[], it.plans.failures as f64),
    },
    Family {
        name: "hearth_deployment_scalings",
        help: "Plans with more (up) or fewer (down) Pods in the pool than the one before",
        kind: Kind::Counter,
        series: |it, sink| {
            for (index, role) in SCALED.into_iter().enumerate() {
                for (direction, counts) in [("up", it.plans.up), ("down", it.plans.down)] {
                    let labels = [("pool", role.as_str()), ("direction", direction)];
                    sink.put(&labels, counts[index] as f64)?;
                }
            }
            Ok(())
        },
    },
    Family {
        name: "hearth_deployment_reconcile_failures",
        help: "Reconciles that failed and were repeated",
        kind: Kind::Counter,
        series: |it, sink| sink.put(&[], it.failures as f64),
    },
];

fn each_pool(it: &Figures, sink: &mut Sink<'_, '_>, part: fn(&Pool) -> u32) -> fmt::Result {
    let mut pools = it.state.pools.iter();
    pools.try_for_each(|pool| sink.put(&[("pool", &pool.name)], f64::from(part(pool))))
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::names::OUTCOME_FAILED;
    use hearth_controller_core::testing::samples;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    fn text(deployments: &Deployments) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(deployments.clone()));
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        text
    }

    fn plan(generation: u64, decode: usize) -> Arc<InferencePlan> {
        let mut spec = samples::plan();
        spec.generation = generation;
        let rank = spec.ranks_of(PlanRole::Decode).next().cloned();
        spec.ranks.retain(|rank| rank.role != PlanRole::Decode);
        spec.ranks.extend(rank.into_iter().cycle().take(decode));
        Arc::new(InferencePlan::new(&format!("demo-{generation}"), spec))
    }

    #[test]
    fn a_deployment_has_its_series_until_it_is_gone() {
        let (all, key) = (Deployments::default(), Key::new("team", "demo"));
        let mut deployment = hearth_controller_core::testing::deployment("");
        deployment.spec.objectives.time_per_output_token = "50ms".parse().ok();
        let status: InferenceDeploymentStatus = serde_json::from_value(serde_json::json!({
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "", "message": "", "lastTransitionTime": ""},
                {"type": "Degraded", "status": "Unknown", "reason": "", "message": "", "lastTransitionTime": ""},
            ],
            "poolStatuses": [{"name": "decode", "role": "Decode", "desired": 3, "replicas": 3, "ready": 2, "updated": 3, "summary": "2/3"}],
            "plan": {"name": "demo-7", "generation": 7},
        }))
        .expect("status");
        all.reported(&key, Some(&deployment.spec), &status);
        all.certified(&key, Timestamp::from_second(2_000_000_000).expect("time"));
        all.failed(&key);
        let told = text(&all);
        let whose = r#"namespace="team",name="demo""#;
        for line in [
            format!(r#"hearth_deployment_condition{{{whose},type="Ready"}} 1.0"#),
            format!(r#"hearth_deployment_condition{{{whose},type="Degraded"}} 0.0"#),
            format!(r#"hearth_deployment_pool_wanted{{{whose},pool="decode"}} 3.0"#),
            format!(r#"hearth_deployment_pool_ready{{{whose},pool="decode"}} 2.0"#),
            format!("hearth_deployment_plan_generation{{{whose}}} 7.0"),
            format!("hearth_deployment_objective_time_per_output_token_seconds{{{whose}}} 0.05"),
            format!(
                "hearth_deployment_certificate_expiry_timestamp_seconds{{{whose}}} 2000000000.0"
            ),
            format!("hearth_deployment_reconcile_failures_total{{{whose}}} 1.0"),
        ] {
            assert!(told.lines().any(|told| told == line), "{line}\n{told}");
        }
        let unset = "hearth_deployment_objective_time_to_first_token_seconds{";
        assert!(!told.contains(unset), "{told}");
        all.forget(&key);
        assert!(!text(&all).contains("team"));
    }

    #[test]
    fn plans_are_counted_once_and_only_those_of_this_process() {
        let mut plans = Plans::default();
        let see = |plans: &mut Plans, them: &[Arc<InferencePlan>]| {
            plans.see(them.iter().map(|plan| &**plan));
            (plans.made, plans.replaced, plans.failures)
        };
        assert_eq!(see(&mut plans, &[]), (0, 0, 0));
        assert_eq!(see(&mut plans, &[plan(1, 1)]), (1, 0, 0));
        assert_eq!(see(&mut plans, &[plan(1, 1)]), (1, 0, 0), "seen before");
        assert_eq!(see(&mut plans, &[plan(1, 1), plan(2, 3)]), (2, 1, 0));
        assert_eq!((plans.up, plans.down), ([0, 0, 1], [0; 3]));
        let mut failed = InferencePlan::clone(&plan(3, 2));
        failed.status.get_or_insert_default().outcome = Some(OUTCOME_FAILED.to_owned());
        let them = [plan(2, 3), Arc::new(failed)];
        assert_eq!(see(&mut plans, &them), (3, 2, 1));
        assert_eq!(see(&mut plans, &them), (3, 2, 1));
        assert_eq!((plans.up, plans.down), ([0, 0, 1], [0, 0, 1]));

        // After a restart of the operator.
        let mut plans = Plans::default();
        assert_eq!(see(&mut plans, &them), (0, 0, 0));
        assert_eq!(see(&mut plans, &[plan(4, 2)]), (1, 1, 0));
    }
}
