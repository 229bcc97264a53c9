//! `kubectl hearth load` and `unload`: workers that end for want of requests start before the next one, or end now and stay away until
//! they are needed.

use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::Args;
use hearth_controller_core::calls::{self, ANNOTATION_LOAD, ANNOTATION_UNLOAD};
use hearth_controller_core::conditions::{self, AT_ZERO, DECODE_READY, PREFILL_READY, PROGRESSING};
use hearth_crds::{InferenceDeployment, InferenceDeploymentStatus};
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;

use super::access::Access;
use crate::cluster::failure::Failure;
use crate::cluster::lean::LeanDeployment;
use crate::terminal::ui;

pub(super) const EXAMPLES_OF_LOAD: &str = "Examples:\n  kubectl hearth load demo\n  kubectl hearth load demo --wait && kubectl hearth chat demo";
pub(super) const EXAMPLES_OF_UNLOAD: &str =
    "Examples:\n  kubectl hearth unload demo\n  kubectl hearth unload demo --wait --timeout 60";

/// Time between two looks at the deployment.
const PERIOD: Duration = Duration::from_secs(1);

/// Arguments of both commands.
#[derive(Args)]
pub(super) struct LoadArgs {
    /// Which deployment
    name: String,
    /// Wait until it is done
    #[arg(long)]
    wait: bool,
    /// Seconds after which --wait gives up
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Load,
    Unload,
}

/// How far a call is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Way {
    Done,
    Going,
    /// It is undone already, or never was: why.
    Undone(String),
}

impl Call {
    fn annotation(self) -> &'static str {
        match self {
            Self::Load => ANNOTATION_LOAD,
            Self::Unload => ANNOTATION_UNLOAD,
        }
    }

    /// The state that it ends, if that is the present one; `preloads`: workers that have ended start again without a request.
    fn since(self, status: Option<&InferenceDeploymentStatus>, preloads: bool) -> Option<&str> {
        match self {
            Self::Load => calls::ended_since(status),
            Self::Unload => {
                let is_over = !preloads && calls::ended_since(status).is_some();
                calls::loaded_since(status).filter(|_| !is_over)
            }
        }
    }

    /// How far it is; `before`: when the workers had ended or started last, as it was asked for.
    fn way(self, status: Option<&InferenceDeploymentStatus>, preloads: bool, before: &str) -> Way {
        let zero = status.and_then(|status| status.scale_to_zero.as_ref());
        let is_at_zero = zero.is_some_and(|zero| zero.at_zero);
        let is = |type_: &str, holds: &str| {
            conditions::of(status, type_).is_some_and(|it| it.status == holds)
        };
        let has_ended = || {
            let progress = conditions::of(status, PROGRESSING);
            progress.is_some_and(|it| it.status == "False" && it.reason == AT_ZERO)
        };
        let has_pool = conditions::of(status, PREFILL_READY).is_some();
        let is_done = match self {
            Self::Load => {
                !is_at_zero && is(DECODE_READY, "True") && (!has_pool || is(PREFILL_READY, "True"))
            }
            Self::Unload => is_at_zero && has_ended() && self.since(status, preloads).is_none(),
        };
        let has_turned = zero.is_some_and(|zero| zero.since != before);
        let is_back = has_turned && is_at_zero == (self == Self::Load);
        match (is_done, zero) {
            (true, _) => Way::Done,
            (false, Some(zero)) if is_back => Way::Undone(zero.reason.clone()),
            _ => Way::Going,
        }
    }

    /// What is so already, what begins, what has happened, and what has been undone.
    fn words(self) -> [&'static str; 4] {
        match self {
            Self::Load => [
                "its workers run, or start already",
                "its workers start",
                "its workers are ready",
                "its workers have ended again",
            ],
            Self::Unload => [
                "it has no workers that could end",
                "its workers end when they have answered what they have begun, and stay away until a request comes",
                "its workers have ended; the next request starts them again",
                "its workers start again",
            ],
        }
    }
}

/// Asks the operator for it.
pub(super) async fn run(call: Call, args: &LoadArgs, access: &Access) -> anyhow::Result<()> {
    let (_, deployment) = access.deployment(&args.name).await?;
    let name = &args.name;
    may_be_asked(&deployment).map_err(|why| anyhow!("{name} {why}"))?;
    let [already, begins, done, undone] = call.words();
    let status = deployment.status.as_ref();
    let preloads = deployment.spec.autoscaling.preload;
    let mut asked = call.since(status, preloads).map(str::to_owned);
    match &asked {
        None => ui::say(format_args!("{name}: {already}")),
        Some(since) => {
            ask(call, since, access, name).await?;
            ui::say(format_args!("{name}: {begins}"));
        }
    }
    if !args.wait {
        return Ok(());
    }
    let zero = status.and_then(|status| status.scale_to_zero.as_ref());
    let before = zero.map_or("", |zero| &zero.since).to_owned();
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    loop {
        let status = status_of(access, name).await?;
        match call.way(status.as_ref(), preloads, &before) {
            Way::Done => break,
            Way::Undone(why) => bail!("{name}: {undone}: {why}"),
            Way::Going if Instant::now() >= deadline => bail!(
                "{name}: not done after {} s\n  {} status {name} tells why; wait longer: --timeout SECONDS",
                args.timeout,
                access.program
            ),
            Way::Going => tokio::time::sleep(PERIOD).await,
        }
        // They have ended for another reason meanwhile, and would come back.
        let ended =
            calls::ended_since(status.as_ref()).filter(|_| call == Call::Unload && preloads);
        let since = ended.and(call.since(status.as_ref(), preloads));
        if let Some(since) = since.filter(|since| asked.as_deref() != Some(since)) {
            ask(call, since, access, name).await?;
            asked = Some(since.to_owned());
        }
    }
    ui::say(format_args!("{name}: {done}"));
    Ok(())
}

/// Why neither makes sense, and what to do.
fn may_be_asked(deployment: &InferenceDeployment) -> Result<(), String> {
    let spec = &deployment.spec;
    if spec.suspend {
        return Err("is suspended\n  set spec.suspend to false first".to_owned());
    }
    if spec.may_be_emptied() {
        let name = deployment.metadata.name.as_deref().unwrap_or("NAME");
        return Err(format!(
            "has workers that its autoscaler starts and ends\n  kubectl scale infd/{name} --replicas=1, or 0, does so until the autoscaler sets another number"
        ));
    }
    if !spec.may_rest() {
        return Err(
            "has workers that never end\n  decode.scaling: {mode: Auto, minReplicas: 0} lets them; members of a ring always run"
                .to_owned(),
        );
    }
    Ok(())
}

async fn ask(call: Call, since: &str, access: &Access, name: &str) -> anyhow::Result<()> {
    let patch = json!({"metadata": {"annotations": {call.annotation(): since}}});
    let api: Api<LeanDeployment> = access.api();
    let patched = api
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await;
    patched.map(|_| ()).map_err(|error| {
        let failure = Failure::from(error);
        anyhow!("{name} cannot be changed: {failure}\n  it takes the right to patch inferencedeployments: the role hearth-edit has it")
    })
}

async fn status_of(
    access: &Access,
    name: &str,
) -> anyhow::Result<Option<InferenceDeploymentStatus>> {
    let api: Api<LeanDeployment> = access.api();
    let found = api.get(name).await.map_err(Failure::from);
    match found {
        Ok(found) => Ok(found.deployment.ok().and_then(|it| it.status)),
        Err(Failure::NotFound(_)) => bail!("{name} has been deleted meanwhile"),
        Err(other) => Err(access.told("InferenceDeployments", &other)),
    }
}

#[cfg(test)]
mod tests {
    use hearth_controller_core::testing::deployment;
    use hearth_crds::{Condition, ScaleToZeroStatus};

    use super::*;

    const BEFORE: &str = "2026-11-28T12:00:00Z";
    const SINCE: &str = "2026-11-28T12:05:00Z";

    fn told(at_zero: bool, since: &str, all: &[(&str, &str, &str)]) -> InferenceDeploymentStatus {
        let conditions = all.iter().map(|(type_, status, reason)| Condition {
            type_: (*type_).to_owned(),
            status: (*status).to_owned(),
            observed_generation: None,
            last_transition_time: SINCE.to_owned(),
            reason: (*reason).to_owned(),
            message: String::new(),
        });
        InferenceDeploymentStatus {
            conditions: conditions.collect(),
            scale_to_zero: Some(ScaleToZeroStatus {
                at_zero,
                since: since.to_owned(),
                reason: "because".to_owned(),
            }),
            ..InferenceDeploymentStatus::default()
        }
    }

    #[test]
    fn it_is_done_when_workers_are_ready_or_have_ended_and_undone_when_they_turn_back() {
        let starting = told(false, SINCE, &[(DECODE_READY, "False", "Starting")]);
        let mixed = [
            (DECODE_READY, "True", "AllReady"),
            (PREFILL_READY, "False", "Starting"),
        ];
        let half = told(false, SINCE, &mixed);
        let ready = told(false, SINCE, &[(DECODE_READY, "True", "AllReady")]);
        let old = told(false, BEFORE, &[(DECODE_READY, "True", "AllReady")]);
        let ending = told(true, SINCE, &[(PROGRESSING, "True", "ScalingToZero")]);
        let ended = told(true, SINCE, &[(PROGRESSING, "False", AT_ZERO)]);
        let resting = told(true, BEFORE, &[(PROGRESSING, "False", AT_ZERO)]);
        let undone = || Way::Undone("because".to_owned());
        for (status, load, unload) in [
            (&starting, Way::Going, undone()),
            (&half, Way::Going, undone()),
            (&ready, Way::Done, undone()),
            (&old, Way::Done, Way::Going),
            (&ending, undone(), Way::Going),
            (&ended, undone(), Way::Done),
            (&resting, Way::Going, Way::Done),
        ] {
            for (call, want) in [(Call::Load, load), (Call::Unload, unload)] {
                let way = call.way(Some(status), false, BEFORE);
                assert_eq!(way, want, "{call:?} {status:?}");
            }
        }
        for (preloads, unload) in [(false, None), (true, Some(SINCE))] {
            assert_eq!(Call::Load.since(Some(&ended), preloads), Some(SINCE));
            assert_eq!(Call::Unload.since(Some(&ended), preloads), unload);
            for (status, since) in [(&old, SINCE), (&starting, SINCE)] {
                assert_eq!(Call::Unload.since(Some(status), preloads), Some(since));
                assert_eq!(Call::Load.since(Some(status), preloads), None);
            }
        }
    }

    #[test]
    fn workers_that_would_come_back_without_a_request_are_unloaded_once_the_status_says_so() {
        let at_zero = [(PROGRESSING, "False", AT_ZERO)];
        let mut ended = told(true, SINCE, &at_zero);
        let way = |status: &InferenceDeploymentStatus| Call::Unload.way(Some(status), true, BEFORE);
        assert_eq!(way(&ended), Way::Going);
        let zero = ended.scale_to_zero.as_mut().unwrap();
        zero.reason = calls::UNLOADED.to_owned();
        assert_eq!(way(&ended), Way::Done);
        assert_eq!(Call::Unload.since(Some(&ended), true), None);
    }

    #[test]
    fn workers_that_never_end_are_neither_loaded_nor_unloaded() {
        let why = may_be_asked(&deployment("")).unwrap_err();
        assert!(why.contains("minReplicas: 0"), "{why}");
        let zero = "decode: {scaling: {mode: Auto, minReplicas: 0, maxReplicas: 1}}\n";
        may_be_asked(&deployment(zero)).unwrap();
        let why = may_be_asked(&deployment(&format!("{zero}suspend: true\n"))).unwrap_err();
        assert!(why.contains("spec.suspend"), "{why}");
        let external = deployment("decode: {scaling: {mode: External, minReplicas: 0}}\n");
        let why = may_be_asked(&external).unwrap_err();
        assert!(why.contains("kubectl scale"), "{why}");
    }
}
