//! Whether requests are answered.

use super::StatusInput;
use super::causes::is_up;
use crate::candidates::is_down;
use crate::cause::node_of;
use crate::observed::PodView;
use crate::routes::reachable;

/// What becomes of a request, whichever gateway takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is answered.
    Answered,
    /// It is answered for now, but a gateway that starts will have no worker to send it to.
    SoonHeld,
    /// It is held, or there is no gateway that takes it.
    Held,
}

/// What becomes of requests once everything that is decided now is done. A gateway that is there will take requests without another
/// word from here, whatever keeps it from that now: an image may come, and a node get room.
pub(super) fn fate(input: &StatusInput<'_>) -> Fate {
    let left = input.left.iter().map(|pod| &**pod);
    let pods: Vec<&PodView> = left.filter(|pod| input.is_whole(pod)).collect();
    let answers = |routes: &str| reachable(routes, &pods).0 > 0;
    let is_gone =
        |pod: &PodView| pod.is_deleting || pod.has_ended() || is_down(input.observed, node_of(pod));
    let gateways = pods.iter();
    let gateways = gateways.filter(|pod| pod.role.is_gateway() && !is_gone(pod));
    let (open, closed): (Vec<&PodView>, Vec<&PodView>) =
        gateways.partition(|pod| is_up(input.observed, pod, &pod.rank));
    if open.is_empty() || !open.iter().all(|pod| answers(&pod.routes)) {
        return Fate::Held;
    }
    let closed = closed.iter().map(|pod| &*pod.routes);
    let mut starting = closed.chain(input.created_routes.iter().copied());
    match starting.all(answers) {
        true => Fate::Answered,
        false => Fate::SoonHeld,
    }
}
