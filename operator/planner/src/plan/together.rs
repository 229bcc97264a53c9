//! The choice of GPUs that read prompts together: as many as the spec asks for, or as pay.

use hearth_crds::{
    FieldError, InferencePlanSpec, MOST_WAITING_BYTES, PEERS_VERSION, PlanRole, PrefillMode,
    ScalingSpec, format_bytes,
};

use super::Planning;
use crate::advice;
use crate::draft::Draft;
use crate::error::{Advice, PlanError};
use crate::expert_parallel::{PEERS, small_ep_keeps_bits};
use crate::gpus::usable_count;
use crate::input::PlanInput;
use crate::numerics::peers_are_alike;
use crate::place::{Objection, Refused, Wanted, no_peers};
use crate::sentences::ms;

/// How much faster a long prompt must be for peers to be chosen: they hold memory of each GPU, and disturb answers.
const LEAST_GAIN: f64 = 1.2;

/// GPUs that may read prompts together.
struct Usable<'a> {
    /// Their number.
    count: u32,
    /// Those of each node, in words.
    accounts: String,
    /// GPUs on nodes whose workers read no plans of peers.
    too_old: u32,
    /// These nodes.
    old_nodes: Vec<&'a str>,
}

impl<'a> Usable<'a> {
    fn of(planning: &Planning<'a>) -> Self {
        let (mut count, mut too_old) = (0, 0);
        let (mut accounts, mut old_nodes) = (Vec::new(), Vec::new());
        for node in planning.estimator.nodes() {
            let here = usable_count(node, planning.estimator.gpus());
            accounts.push(format!("{} {here}", node.node));
            if node.reads_up_to() < PEERS_VERSION {
                too_old += here;
                old_nodes.push(&*node.node);
            } else {
                count += here;
            }
        }
        Self {
            count,
            accounts: accounts.join(", "),
            too_old,
            old_nodes,
        }
    }

    /// Numbers of peers that there are GPUs for, the largest first.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        PEERS.into_iter().filter(|peers| *peers <= self.count)
    }
}

impl Planning<'_> {
    /// The numbers of peers that are tried, best first; 0: each prefill rank reads prompts alone. Those that exchange least come first;
    /// which of them reads a prompt soonest is decided once one has room.
    ///
    /// # Errors
    /// [`PlanError`] if the spec asks for more peers than there are GPUs.
    pub(super) fn numbers_of_peers(&self) -> Result<Vec<u32>, PlanError> {
        let prefill = &self.input.spec.prefill;
        if prefill.mode != PrefillMode::DistributedStreamLoading {
            return Ok(vec![0]);
        }
        let usable = Usable::of(self);
        let least = prefill.gpus_per_worker.unwrap_or(2);
        if usable.count >= least {
            let asked = prefill.gpus_per_worker.map(|asked| vec![asked]);
            let mut numbers = asked.unwrap_or_else(|| usable.numbers().collect());
            numbers.sort_by_key(|peers| !small_ep_keeps_bits(*peers));
            numbers.retain(|peers| self.messages_fit(*peers));
            return match numbers.is_empty() {
                true => Err(self.too_long(least, &usable)),
                false => Ok(numbers),
            };
        }
        if usable.count + usable.too_old >= least {
            return Err(PlanError::Unsupported(vec![FieldError::new(
                "spec.prefill.mode",
                "is \"DistributedStreamLoading\"",
                format!("{}, or write StreamLoading", no_peers(&usable.old_nodes)),
            )]));
        }
        Err(PlanError::TooFewPeers {
            peers: least,
            asked_by: self.asked.asked_by(),
            usable: usable.count,
            accounts: usable.accounts,
            advice: self.fewer_peers(least),
        })
    }

    /// Whether what so many peers exchange for the longest prompt may wait at one of them.
    fn messages_fit(&self, peers: u32) -> bool {
        self.demand.exchange_bytes(peers) <= MOST_WAITING_BYTES
    }

    /// What is said of a context whose rows are too many to be exchanged by so many peers.
    fn too_long(&self, peers: u32, usable: &Usable<'_>) -> PlanError {
        let tokens = self.demand.context_length;
        let number = self
            .number_that_fits(usable)
            .map_or_else(String::new, |peers| {
                format!("spec.prefill.gpusPerWorker: {peers}, ")
            });
        PlanError::Unsupported(vec![FieldError::new(
            "spec.model.contextLength",
            format!("is {tokens}"),
            format!(
                "{peers} GPUs would exchange up to {} of rows for a prompt of that length, and a worker takes {}: write {number}a shorter contextLength, or prefill.mode: StreamLoading",
                format_bytes(self.demand.exchange_bytes(peers)),
                format_bytes(MOST_WAITING_BYTES)
            ),
        )])
    }

    /// The largest number of peers with which there is a plan, where the spec asks for another one: what they exchange depends on
    /// how rows come to the experts, and larger numbers may exchange less.
    fn number_that_fits(&self, usable: &Usable<'_>) -> Option<u32> {
        self.input.spec.prefill.gpus_per_worker?;
        let mut numbers = usable.numbers().filter(|peers| self.messages_fit(*peers));
        numbers.find(|peers| {
            let mut spec = self.input.spec.clone();
            spec.prefill.gpus_per_worker = Some(*peers);
            let input = &PlanInput {
                spec: &spec,
                ..*self.input
            };
            let estimator = &self.estimator.with_spec(&spec);
            Planning {
                input,
                estimator,
                ..*self
            }
            .best()
            .is_ok()
        })
    }

    /// A change after which the spec asks for fewer GPUs than so many, if one fits.
    fn fewer_peers(&self, peers: u32) -> Option<Advice> {
        let candidates = self.asked.candidates(true, self.demand.reader_version);
        let (spec, demand) = (self.input.spec, &self.demand);
        candidates.into_iter().find_map(|devices| {
            let wanted = self.wanted(devices, peers);
            advice::fewer_peers(self.estimator, demand, wanted, spec)
        })
    }

    /// The plan with as many peers as read a long prompt soonest, where the spec leaves their number open.
    pub(super) fn with_peers(
        &self,
        wanted: Wanted,
        draft: Draft<'_>,
        plan: InferencePlanSpec,
    ) -> InferencePlanSpec {
        match wanted.peers {
            0 => self.together_or_alone(wanted, draft, plan),
            _ => self.with_other_number(wanted, &draft, plan),
        }
    }

    /// A plan with peers, or one with another number of them that reads a long prompt sooner.
    fn with_other_number(
        &self,
        wanted: Wanted,
        draft: &Draft<'_>,
        plan: InferencePlanSpec,
    ) -> InferencePlanSpec {
        let tokens = draft.long_prompt_tokens();
        let head = plan.ranks_of(PlanRole::Prefill).next();
        let own_ms = head.and_then(|head| draft.together_ttft_ms(head, tokens));
        let (None, Some(own_ms)) = (self.input.spec.prefill.gpus_per_worker, own_ms) else {
            return plan;
        };
        let Ok(other) = self.soonest(wanted, draft, tokens, &Usable::of(self)) else {
            return plan;
        };
        let own = Group {
            peers: wanted.peers,
            ttft_ms: own_ms,
            plan,
        };
        let (mut sooner, slower) = match other.ttft_ms < own.ttft_ms {
            true => (other, own),
            false => (own, other),
        };
        sooner.plan.not_chosen.push(format!(
            "{} GPUs reading prompts together: a prompt of {tokens} tokens would take {}, and {} on {}",
            slower.peers,
            ms(slower.ttft_ms),
            ms(sooner.ttft_ms),
            sooner.peers
        ));
        sooner.plan
    }

    /// A plan of mode Auto in which a prefill rank streams prompts, with as many peers as read a long one soonest; the plan as it
    /// is where they do not pay, have no room or are not wanted.
    fn together_or_alone(
        &self,
        wanted: Wanted,
        mut alone: Draft<'_>,
        plan: InferencePlanSpec,
    ) -> InferencePlanSpec {
        let usable = Usable::of(self);
        if !self.may_have_peers(wanted) || usable.count + usable.too_old < 2 {
            return plan;
        }
        let tokens = alone.long_prompt_tokens();
        let alone_ms = plan
            .ranks_of(PlanRole::Prefill)
            .next()
            .and_then(|head| alone.alone_ttft_ms(head, tokens));
        let Some(alone_ms) = alone_ms.filter(|_| plan.routing.chunked_below_tokens <= tokens)
        else {
            return plan;
        };
        let (why, peers) = match self.soonest(wanted, &alone, tokens, &usable) {
            Ok(group) if alone_ms >= group.ttft_ms * LEAST_GAIN => return group.plan,
            Ok(group) => (
                Objection::Slower(format!(
                    "a prompt of {tokens} tokens would take {}, and {} on one: not {LEAST_GAIN} times as fast",
                    ms(group.ttft_ms),
                    ms(alone_ms)
                )),
                group.peers,
            ),
            Err(why) => (why, 2),
        };
        alone.refused.push(Refused {
            devices: wanted.devices,
            peers,
            why,
        });
        alone.to_plan()
    }

    /// Whether the spec leaves it to the planner how many GPUs read a prompt.
    fn may_have_peers(&self, wanted: Wanted) -> bool {
        let prefill = &self.input.spec.prefill;
        let scaling = prefill.scaling.as_ref();
        prefill.mode == PrefillMode::Auto
            && prefill.gpus_per_worker.is_none()
            && !scaling.is_some_and(ScalingSpec::is_dynamic)
            && wanted.prefill == 1
            && wanted.devices.prefill.is_streaming()
    }

    /// The group that reads a prompt of `tokens` soonest, of another number of peers than `wanted` has, with decode ranks where they
    /// are in `draft`.
    ///
    /// # Errors
    /// Why there is none.
    fn soonest(
        &self,
        wanted: Wanted,
        draft: &Draft<'_>,
        tokens: u32,
        usable: &Usable<'_>,
    ) -> Result<Group, Objection> {
        let mut why = Objection::Slower(no_peers(&usable.old_nodes));
        let mut best: Option<Group> = None;
        for peers in usable.numbers().filter(|peers| *peers != wanted.peers) {
            if !self.messages_fit(peers) {
                let bytes = format_bytes(self.demand.exchange_bytes(peers));
                why = Objection::Slower(format!(
                    "they would exchange up to {bytes} of rows for a prompt of the whole context, more than a worker takes"
                ));
                continue;
            }
            match self.group(Wanted { peers, ..wanted }, draft, tokens) {
                Ok(group)
                    if best
                        .as_ref()
                        .is_none_or(|best| group.ttft_ms < best.ttft_ms) =>
                {
                    best = Some(group);
                }
                Ok(_) => {}
                Err(objection) => why = objection,
            }
        }
        best.ok_or(why)
    }

    fn group(&self, wanted: Wanted, alone: &Draft<'_>, tokens: u32) -> Result<Group, Objection> {
        let draft = self.draft(wanted, alone.refused.clone());
        let draft = draft.map_err(Objection::NoRoom)?;
        let decode = |draft: &Draft<'_>| {
            let placed = draft.placement.ranks.iter();
            placed.map(|ranks| ranks.decode).collect::<Vec<_>>()
        };
        if decode(&draft) != decode(alone) {
            return Err(Objection::Slower(
                "decode would have to move to another node".to_owned(),
            ));
        }
        let plan = draft.to_plan();
        if !peers_are_alike(draft.nodes, &plan.ranks) {
            return Err(Objection::Slower(
                "they are of different kinds, and a prompt would have other bits than on one"
                    .to_owned(),
            ));
        }
        let ttft_ms = plan
            .ranks_of(PlanRole::Prefill)
            .next()
            .and_then(|head| draft.together_ttft_ms(head, tokens));
        Ok(Group {
            peers: wanted.peers,
            ttft_ms: ttft_ms.unwrap_or(f64::INFINITY),
            plan,
        })
    }
}

/// A plan with peers.
struct Group {
    peers: u32,
    /// Milliseconds to the first token of a long prompt that all read together.
    ttft_ms: f64,
    plan: InferencePlanSpec,
}
