//! The routes of gateways and of heads of groups during a rollout.

use std::time::Duration;

use hearth_crds::{PlanRole, Route};

use super::{Mode, Sorted, Steps, Want};
use crate::age::{age, is_older};
use crate::observed::{PodRole, PodView};
use crate::routes::{endpoints, is_gateway, routes_of, routes_to, text};

/// Most time that a busy kubelet takes to show a gateway new routes, and the gateway to read them.
const READ_AFTER: Duration = Duration::from_secs(15);

/// Time in which others' Pods that are about to end are gone, since the target's gateway was created.
const OTHERS_LEAVE: Duration = Duration::from_secs(20);

impl Sorted<'_> {
    /// Whether a gateway of the target was last told to send requests to `pod`.
    pub(super) fn is_routed(&self, pod: &PodView) -> bool {
        self.made
            .iter()
            .flatten()
            .filter(|gateway| is_gateway(gateway))
            .any(|gateway| {
                routes_of(gateway)
                    .iter()
                    .any(|route| endpoints(pod).any(|endpoint| endpoint == route.endpoint))
            })
    }

    /// The target's workers that take requests and have an address.
    fn target_routes(&self) -> Vec<Route> {
        let workers = self.wants().filter(|(_, want)| !want.is_gateway());
        self.routes_of_made(workers)
            .filter(takes_requests)
            .collect()
    }

    /// The members of a group of the target that have an address, its head among them. A member may be the second rank of its
    /// Pod.
    pub(super) fn group_routes(&self, head: &Want) -> Vec<Route> {
        let is_member = |rank: &str| head.group.iter().any(|member| member == rank);
        let members = self
            .wants()
            .filter(|(_, want)| want.ranks().any(|(rank, _)| is_member(rank)));
        let routes = self.routes_of_made(members);
        routes.filter(|route| is_member(&route.name)).collect()
    }

    fn routes_of_made<'w>(
        &'w self,
        wants: impl Iterator<Item = (usize, &'w Want)> + 'w,
    ) -> impl Iterator<Item = Route> + 'w {
        wants
            .filter_map(|(index, want)| Some(routes_to(self.made[index]?, want.ranks())))
            .flatten()
    }

    /// Whether a Pod's plan serves the target's model in the same way.
    pub(super) fn is_compatible(&self, pod: &PodView) -> bool {
        let compatible = &self.input.compatible_generations;
        compatible.contains(&pod.plan_generation)
    }

    /// Old workers that serve the target's model: its gateways send requests to them until its own workers are ready, or
    /// they must make room.
    fn compatible_routes(&self, mode: Mode) -> Vec<Route> {
        let workers = self.extra.iter().filter(|pod| {
            !is_gateway(pod)
                && pod.is_ready
                && self.is_compatible(pod)
                && !self.is_useless(pod)
                && !self.extras_leave(mode)
                && !self.makes_room(pod, mode)
        });
        workers
            .flat_map(|pod| routes_to(pod, pod.ranks()))
            .filter(takes_requests)
            .collect()
    }

    /// Whether the target's gateways send no more requests to extras.
    fn extras_leave(&self, mode: Mode) -> bool {
        match mode {
            Mode::Alone => true,
            Mode::Surge => self.workers_are_ready(),
            Mode::OldDownFirst => !self.leftovers().any(is_gateway),
        }
    }

    /// The routes of a gateway of the target that is created now.
    pub(super) fn first_routes(&self, mode: Mode) -> Vec<Route> {
        let mut routes = self.target_routes();
        routes.extend(self.compatible_routes(mode));
        routes
    }

    /// The routes that `gateway` should have.
    ///
    /// A worker that is not wanted stays while it is routed to: the gateway was given it because it serves the same model.
    fn routes(&self, gateway: &PodView, mode: Mode) -> Vec<Route> {
        let is_target = self.is_wanted(gateway);
        let mut routes = Vec::new();
        if is_target {
            routes = self.first_routes(mode);
        } else if self.is_compatible(gateway) {
            routes = self.target_routes();
        }
        let extras_leave = is_target && self.extras_leave(mode);
        let kept = self.made.iter().flatten().filter(|_| !is_target);
        let stays = |pod: &&&PodView| {
            !(extras_leave || self.is_useless(pod) || is_target && self.makes_room(pod, mode))
        };
        let others = self.extra.iter().filter(stays).chain(kept);
        let absent = self.absent.iter().filter(|_| !self.workers_are_ready());
        let alive: Vec<String> = others
            .chain(absent)
            .flat_map(|pod| endpoints(pod))
            .collect();
        for route in routes_of(gateway) {
            let is_new = routes
                .iter()
                .all(|other: &Route| other.endpoint != route.endpoint);
            if is_new && alive.contains(&route.endpoint) {
                routes.push(route);
            }
        }
        routes
    }

    /// Time that an old gateway still needs to read the routes to the target's workers, without which what runs through it would not
    /// go on; `None` where it needs none, since a worker of its own plan is there.
    pub(super) fn reads_for(&self, gateway: &PodView, mode: Mode) -> Option<Duration> {
        let has_worker = self.input.pods.iter().any(|pod| {
            pod.role == PodRole::Rank(PlanRole::Decode)
                && pod.plan_generation == gateway.plan_generation
                && pod.is_ready
                && !pod.is_deleting
        });
        if has_worker || !gateway.is_ready || !self.is_compatible(gateway) {
            return None;
        }
        if self.routes(gateway, mode) != routes_of(gateway) {
            return Some(READ_AFTER);
        }
        let left = READ_AFTER.saturating_sub(age(gateway.routed?, self.input.now));
        (!left.is_zero()).then_some(left)
    }

    /// Whether requests that an old gateway holds may be answered by the target's workers: it serves the same model, and
    /// when the old decode workers, all about to go, are gone, the target may fit beside it. Where it does not fit even without the old
    /// gateways, it waits for room that others have, and they go on holding requests for a while.
    pub(super) fn holds_requests(&self, gateway: &PodView) -> bool {
        let is_decoder = |pod: &&PodView| pod.role == PodRole::Rank(PlanRole::Decode);
        let mut workers = self.leftovers().filter(is_decoder).peekable();
        let may_answer = match workers.peek() {
            Some(_) => workers.all(|pod| pod.is_deleting),
            None => self.lacks_others_room(),
        };
        self.is_compatible(gateway) && may_answer
    }

    /// Whether the target has lacked room for a short time, also without the old gateways.
    fn lacks_others_room(&self) -> bool {
        let mut made = self.made.iter().flatten().filter(|pod| is_gateway(pod));
        let has_waited = made.any(|pod| is_older(pod.created, self.input.now, OTHERS_LEAVE));
        let new: Vec<&Want> = self.missing().map(|(_, want)| want).collect();
        let is_old = |pod: &PodView| is_gateway(pod) && !self.is_wanted(pod);
        !has_waited && !self.fits_beside(&new, |pod| !is_old(pod))
    }

    pub(super) fn changed_routes(&self, mode: Mode) -> Vec<(String, String)> {
        let made = self.made.iter().flatten();
        let gateways = made.chain(&self.extra).filter(|pod| is_gateway(pod));
        let of_gateways = gateways.map(|gateway| (*gateway, self.routes(gateway, mode)));
        // The head of a group that is replaced keeps its own.
        let heads = self.wants().filter(|(_, want)| want.is_group_head());
        let of_heads =
            heads.filter_map(|(index, want)| Some((self.made[index]?, self.group_routes(want))));
        of_gateways
            .chain(of_heads)
            .filter(|(pod, routes)| pod.routes.is_empty() || *routes != routes_of(pod))
            .map(|(pod, routes)| (pod.name.clone(), text(&routes)))
            .collect()
    }
}

impl Steps {
    /// Routes of the gateways that are created.
    pub(crate) fn created_routes(&self, wants: &[Want]) -> Vec<&str> {
        let gateways = self
            .create
            .iter()
            .filter(|(index, _)| wants[*index].is_gateway());
        gateways
            .filter_map(|(_, routes)| routes.as_deref())
            .collect()
    }
}

/// Whether gateways send requests there: stages compute for the heads of their groups alone.
fn takes_requests(route: &Route) -> bool {
    route.role != PlanRole::Stage
}
