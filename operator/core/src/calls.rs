//! What somebody asks of a deployment once, apart from its spec: that its workers start before the next request (`kubectl hearth load`),
//! or end before they are idle for long enough, and stay away until they are needed (`kubectl hearth unload`).
//!
//! An annotation names the state that shall end, by the time at which it began. So no two clocks are compared, and a call is for once:
//! the next state has another time.

use hearth_crds::{InferenceDeployment, InferenceDeploymentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::conditions::{self, DECODE_READY};

/// Annotation: the workers that have ended since that time (`status.scaleToZero.since`) shall start.
pub const ANNOTATION_LOAD: &str = "hearth.dev/load";
/// Annotation: the workers that have been ready since that time (of the condition `DecodeReady`), or that start since then, shall end,
/// and those that have ended since then (`status.scaleToZero.since`) shall not start without a request.
pub const ANNOTATION_UNLOAD: &str = "hearth.dev/unload";
/// Why workers have ended, or stay away, that do not start again before they are needed.
pub const UNLOADED: &str = "an unload was asked for";

/// What a load names: since when there have been no workers; `None` while there are some.
pub fn ended_since(status: Option<&InferenceDeploymentStatus>) -> Option<&str> {
    let zero = status?.scale_to_zero.as_ref()?;
    zero.at_zero.then_some(&*zero.since)
}

/// What an unload names: since when decode workers have been ready; else since when workers that had ended start again, or have ended
/// without one. `None` before the first are ready, and after an unload.
pub fn loaded_since(status: Option<&InferenceDeploymentStatus>) -> Option<&str> {
    let zero = status.and_then(|status| status.scale_to_zero.as_ref());
    let turned = || zero.filter(|zero| !(zero.at_zero && zero.reason == UNLOADED));
    ready_since(status).or_else(|| turned().map(|zero| &*zero.since))
}

fn ready_since(status: Option<&InferenceDeploymentStatus>) -> Option<&str> {
    let ready = conditions::of(status, DECODE_READY)?;
    (ready.status == "True").then_some(&*ready.last_transition_time)
}

/// Whether somebody wants workers to start.
pub(crate) fn is_to_load(deployment: &InferenceDeployment) -> bool {
    let since = ended_since(deployment.status.as_ref());
    since.is_some() && of(&deployment.metadata)[0].map(String::as_str) == since
}

/// Whether somebody wants the workers to end that are ready or start, or those that have ended to stay away. A call that names a start
/// waits, as any other, until nobody needs the workers, ready or not.
pub(crate) fn is_to_unload(deployment: &InferenceDeployment) -> bool {
    let status = deployment.status.as_ref();
    let zero = status.and_then(|status| status.scale_to_zero.as_ref());
    let states = [ready_since(status), zero.map(|zero| &*zero.since)];
    let named = of(&deployment.metadata)[1].map(String::as_str);
    named.is_some() && states.contains(&named)
}

/// Both annotations.
pub fn of(metadata: &ObjectMeta) -> [Option<&String>; 2] {
    let annotations = metadata.annotations.as_ref();
    [ANNOTATION_LOAD, ANNOTATION_UNLOAD].map(|name| annotations?.get(name))
}
