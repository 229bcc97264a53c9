//! Workers that start without a request as soon as nodes have room for them (`autoscaling.preload`).
//!
//! They take the room that is free and ask nobody for more, nor do they take what others are about to get. While nothing has been asked of
//! them, they end for others at once, ready or not, and where their place is lost. So a start in vain costs others nothing; how often
//! there may be one is limited by the time for which workers stay at least.

use std::time::Duration;

use hearth_crds::{InferenceDeploymentStatus, ScaleToZeroStatus};
use jiff::Timestamp;

use crate::age::age;
use crate::calls::UNLOADED;
use crate::conditions::{self, DECODE_READY};
use crate::observed::{Demand, Observed};
use crate::sharing::IDLE;

/// Why workers start that nobody has asked for.
pub(crate) const PRELOADED: &str = "nodes have room for them";
/// Why workers end that nobody has asked for.
pub(crate) const PLACE_LOST: &str = "their place is lost and nobody has asked for them";
/// Interval at which one that finds no room looks for it again.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(30);

/// Since when workers have run, or are starting, that were started without a request; `None` if there are none.
pub fn preloaded_since(status: Option<&InferenceDeploymentStatus>) -> Option<Timestamp> {
    let zero = status.and_then(|status| status.scale_to_zero.as_ref());
    let zero = zero.filter(|zero| !zero.at_zero && zero.reason == PRELOADED)?;
    zero.since.parse().ok()
}

/// Whether a deployment that is at zero starts its workers without a request, as soon as it may and there is room.
pub(crate) fn is_wanted(observed: &Observed, zero: &ScaleToZeroStatus) -> bool {
    let spec = &observed.deployment.spec;
    spec.may_rest() && spec.autoscaling.preload && zero.reason != UNLOADED
}

/// Time until workers that ended may be started without a request.
pub(crate) fn left(observed: &Observed, zero: &ScaleToZeroStatus) -> Duration {
    let since = zero.since.parse::<Timestamp>().unwrap_or(observed.now);
    let distance = observed.settings.nodes.min_residence;
    distance.saturating_sub(age(since, observed.now))
}

/// Time after which to look for room, given the time that is left. Each deployment looks at times of its own: not all plan at once.
pub(crate) fn look_again(observed: &Observed, left: Duration) -> Duration {
    if !left.is_zero() {
        return left;
    }
    let uid = observed.deployment.metadata.uid.as_deref();
    let of_uid = |sum: u64, byte: u8| sum.wrapping_mul(31).wrapping_add(u64::from(byte));
    let offset_s = uid.unwrap_or_default().bytes().fold(0, of_uid);
    let now_s = u64::try_from(observed.now.as_second()).unwrap_or_default();
    let interval_s = LOOK_FOR_ROOM.as_secs();
    let since_s = (now_s % interval_s + offset_s % interval_s) % interval_s;
    Duration::from_secs(interval_s - since_s)
}

/// Whether nobody needs workers that started without a request: nothing has been asked since, or whoever asked has gone before they
/// were ready. False where nobody knows.
pub(crate) fn is_unneeded(observed: &Observed, demand: &Demand) -> bool {
    let status = observed.deployment.status.as_ref();
    let (Some(idle_s), Some(since)) = (demand.idle_s, preloaded_since(status)) else {
        return false;
    };
    let is_unasked = idle_s >= age(since, observed.now).as_secs_f64();
    let is_ready = conditions::of(status, DECODE_READY).is_some_and(|it| it.status == "True");
    let is_in_vain = !is_ready && idle_s >= IDLE.as_secs_f64();
    demand.held == 0.0 && (is_unasked || is_in_vain)
}
