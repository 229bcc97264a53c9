//! Workers that a request is given: one that writes the answer and, if it is another, one that reads the prompt.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hearth_transport::v1::DescribeResponse;

use super::{Lease, PrefillLease, WorkerPool};
use crate::router::line::Turn;
use crate::router::member::{Member, MemberState};
use crate::router::policy::{
    Candidate, PrefillRoute, choose_decode, choose_prefill, choose_prefill_route,
};
use crate::router::prefix::PrefixKey;
use crate::router::types::{Health, Pin, Role, Want};

/// Workers that a request runs on.
pub struct Route {
    /// The worker that writes the answer.
    pub decode: Lease,
    /// The worker that reads the prompt, if it is another one.
    pub prefill: Option<PrefillLease>,
    /// Whether that one reads it without its peers.
    pub reads_alone: bool,
    /// Its turn among those that come from the queue to the same decode worker.
    pub turn: Turn,
}

/// Requirement of a request on the workers that it may be given.
#[derive(Clone, Copy)]
enum Demand<'a> {
    /// None yet.
    Any,
    /// The same weights.
    Model(&'a Pin),
    /// The same weights and the same numerics.
    Exact(&'a Pin),
}

impl Demand<'_> {
    fn is_met_by(self, state: &MemberState) -> bool {
        match self {
            Self::Any => true,
            Self::Model(pin) => is_same_model(state, pin),
            Self::Exact(pin) => {
                is_same_model(state, pin) && state.description.numerics == pin.numerics
            }
        }
    }
}

impl WorkerPool {
    pub(super) fn try_acquire(
        self: &Arc<Self>,
        want: &Want<'_>,
        key: &PrefixKey,
        any_numerics: bool,
    ) -> Option<Route> {
        let members = self.members();
        let Some(pin) = want.pin else {
            return self.try_route(&members, want, key, Demand::Any);
        };
        let exact = self.try_route(&members, want, key, Demand::Exact(pin));
        // Other numerics are better than none, once no worker is left that may have the same.
        let may_be_exact = |role, numerics: &str| {
            let mut all = members.iter().filter(|member| member.is(role));
            all.any(|member| may_match(&member.lock(), pin, numerics))
        };
        let is_hopeless = !may_be_exact(Role::Decode, &pin.numerics)
            || pin.needs_reader() && !may_be_exact(Role::Prefill, &pin.prompt_numerics);
        if exact.is_some() || !(any_numerics || is_hopeless) {
            return exact;
        }
        self.try_route(&members, want, key, Demand::Model(pin))
    }

    /// Finds a decode worker that meets the demand, and the worker that reads the prompt.
    fn try_route(
        self: &Arc<Self>,
        members: &[Arc<Member>],
        want: &Want<'_>,
        key: &PrefixKey,
        demand: Demand<'_>,
    ) -> Option<Route> {
        let readers = Self::readers(members);
        let candidates = self.candidates(members, &readers, want, key, demand);
        let index = choose_decode(&candidates, self.turn.fetch_add(1, Ordering::Relaxed))?;
        let member = members[index].clone();
        let (description, new_tokens) = {
            let state = member.lock();
            let own = &state.description.numerics;
            let known = state.prefixes.matched_tokens(key, own);
            (state.description.clone(), want.prompt.len() as u32 - known)
        };
        let place = match demand {
            Demand::Exact(pin) if pin.needs_reader() => PrefillRoute::Prefill {
                alone: !self.is_quiet(),
            },
            _ if want.alone => PrefillRoute::Decode,
            _ => choose_prefill_route(
                new_tokens,
                self.routing.chunked_below_tokens,
                self.is_quiet(),
            ),
        };
        let fits = |reader: &&Reader| reader.fits(&description, demand);
        let (prefill, reads_alone) = match place {
            PrefillRoute::Decode => (None, false),
            PrefillRoute::Prefill { alone } => {
                let lease = self.lease_reader(members, readers.iter().filter(fits));
                (lease, alone)
            }
        };
        let reads_itself = prefill.is_none();
        let pin = Pin {
            prompt_numerics: prefill
                .as_ref()
                .map_or(&description.numerics, |prefill| &prefill.numerics)
                .clone(),
            fingerprint: description.model_fingerprint,
            numerics: description.numerics,
        };
        let mut state = member.lock();
        let is_exact = match demand {
            Demand::Exact(wanted) => !(wanted.needs_reader() && reads_itself),
            Demand::Any | Demand::Model(_) => true,
        };
        // A worker that left while it was being chosen has woken us already: the next round sees the others.
        if !is_exact || !state.is_open() {
            return None;
        }
        state.in_flight += 1;
        state.prefixes.remember(key, &pin.prompt_numerics);
        drop(state);
        let decode = Lease {
            pool: self.clone(),
            worker: member.worker.clone(),
            pin,
            epoch: member.epoch.subscribe(),
            member,
        };
        Some(Route {
            decode,
            prefill,
            reads_alone,
            turn: Turn::default(),
        })
    }

    /// Whether peers of prefill workers take part: nothing has been decoded for the window that the plan names.
    fn is_quiet(&self) -> bool {
        let window = self.routing.together_after_quiet;
        window.is_none_or(|window| self.decoded.is_longer_ago(window))
    }

    /// Lists decode workers that meet the demand. A known prefix counts if any possible reader may have read it.
    fn candidates(
        &self,
        members: &[Arc<Member>],
        readers: &[Reader],
        want: &Want<'_>,
        key: &PrefixKey,
        demand: Demand<'_>,
    ) -> Vec<Candidate> {
        let decode = members.iter().enumerate();
        decode
            .filter(|(_, member)| member.is(Role::Decode))
            .filter_map(|(index, member)| {
                let state = member.lock();
                if !state.is_open() || !demand.is_met_by(&state) {
                    return None;
                }
                let matched = |numerics: &str| state.prefixes.matched_tokens(key, numerics);
                let matched_tokens = match demand {
                    Demand::Exact(pin) => matched(&pin.prompt_numerics),
                    Demand::Any | Demand::Model(_) => {
                        let theirs = readers.iter().map(|reader| matched(&reader.numerics));
                        theirs.fold(matched(&state.description.numerics), u32::max)
                    }
                };
                Some(Candidate {
                    index,
                    in_flight: state.in_flight,
                    capacity: self.capacity(&state),
                    matched_tokens,
                    is_avoided: want.avoid == Some(member.id),
                })
            })
            .collect()
    }

    /// Lists the prefill workers that take requests.
    fn readers(members: &[Arc<Member>]) -> Vec<Reader> {
        let prefill = members.iter().enumerate();
        prefill
            .filter(|(_, member)| member.is(Role::Prefill))
            .filter_map(|(index, member)| {
                let state = member.lock();
                state.is_open().then(|| Reader {
                    index,
                    in_flight: state.in_flight,
                    numerics: state.description.numerics.clone(),
                    model_fingerprint: state.description.model_fingerprint.clone(),
                    kv_layout: state.description.kv_layout.clone(),
                })
            })
            .collect()
    }

    /// Leases one of these prefill workers.
    fn lease_reader<'a>(
        self: &Arc<Self>,
        members: &[Arc<Member>],
        readers: impl Iterator<Item = &'a Reader>,
    ) -> Option<PrefillLease> {
        let readers: Vec<&Reader> = readers.collect();
        let loads: Vec<(usize, u32)> = readers.iter().map(|r| (r.index, r.in_flight)).collect();
        let index = choose_prefill(&loads, self.turn.fetch_add(1, Ordering::Relaxed))?;
        let numerics = readers.iter().find(|r| r.index == index)?.numerics.clone();
        let member = members[index].clone();
        let mut state = member.lock();
        // It may have left since it was checked.
        if !state.is_open() {
            return None;
        }
        state.in_flight += 1;
        drop(state);
        Some(PrefillLease {
            pool: self.clone(),
            epoch: member.epoch.subscribe(),
            member,
            numerics,
        })
    }
}

fn is_same_model(state: &MemberState, pin: &Pin) -> bool {
    state.description.model_fingerprint == pin.fingerprint
}

/// A prefill worker as routing sees it.
struct Reader {
    /// Index of the worker in the pool.
    index: usize,
    in_flight: u32,
    numerics: String,
    model_fingerprint: String,
    kv_layout: String,
}

impl Reader {
    /// Whether it may read a prompt for a decode worker with this description.
    fn fits(&self, decode: &DescribeResponse, demand: Demand<'_>) -> bool {
        let reads_alike = match demand {
            Demand::Exact(pin) => self.numerics == pin.prompt_numerics,
            Demand::Any | Demand::Model(_) => true,
        };
        reads_alike
            && self.model_fingerprint == decode.model_fingerprint
            && self.kv_layout == decode.kv_layout
    }
}

/// Whether a worker has the same model and numerics, or may turn out to, since it has not described itself yet.
fn may_match(state: &MemberState, pin: &Pin, numerics: &str) -> bool {
    let is_same = is_same_model(state, pin) && state.description.numerics == numerics;
    !state.is_leaving && (state.health == Health::Starting || is_same)
}
