//! Rings that Auto plans: where no node holds the model, or where one would have to read it from its disk for each token.

use hearth_crds::{FieldError, InferencePlanSpec, PlanRank, Strategy, format_bytes};

use super::{Planning, plan_with};
use crate::error::{Advice, PlanError};
use crate::input::PlanInput;
use crate::node_ranks::Devices;
use crate::piped_ring;
use crate::sentences::{RING_OF_ONE_NODE, ms};

/// How much faster a ring must be than one node that reads from its disk: it has more machines that may fail.
const LEAST_GAIN: f64 = 1.2;
/// What a ring of one node's CPUs and GPUs needs.
const OF_ONE_NODE: &str =
    "spec.strategy is Auto, which makes none of a single node's CPUs and GPUs: write PipedRing";

impl Planning<'_> {
    /// A ring, where the nodes were refused for their memory and one fits. Of one node's CPUs and GPUs none is made, but proposed.
    ///
    /// # Errors
    /// `refused`, with what rules out a ring that would fit.
    pub(super) fn ring_instead(
        &self,
        mut refused: PlanError,
    ) -> Result<InferencePlanSpec, PlanError> {
        let PlanError::InsufficientMemory { advice, .. } = &mut refused else {
            return Err(refused);
        };
        if self.has_one_node() {
            if self.has_usable_gpus() && self.ring_without_obstacles().is_some() {
                advice.push(Advice::Ring(self.obstacles_to_ring_of_one_node()));
            }
            return Err(refused);
        }
        let Some(why) = self.obstacle_to_ring() else {
            let plan = self.ring().plan("no node holds the model");
            return plan.map_err(|_| refused);
        };
        if self.ring_without_obstacles().is_some() {
            advice.push(Advice::Ring(why));
        }
        Err(refused)
    }

    /// The ring of several members that there would be if the spec said nothing against it.
    fn ring_without_obstacles(&self) -> Option<InferencePlanSpec> {
        let mut spec = piped_ring::without_obstacles(self.input.spec);
        if self.has_one_node() {
            spec.strategy = Strategy::PipedRing;
        }
        let plan = plan_with(&PlanInput {
            spec: &spec,
            ..*self.input
        });
        plan.ok().filter(|plan| plan.group_of("decode-0").len() > 1)
    }

    /// `alone`, or a ring where that would read weights from a disk for each token and the ring is faster. Either says what the
    /// other is predicted to do.
    pub(super) fn or_ring(&self, mut alone: InferencePlanSpec) -> InferencePlanSpec {
        let mut readers = alone.ranks.iter();
        let reader = readers.find(|rank| rank.disk_weight_bytes() > 0);
        let Some(reader) = reader else {
            return alone;
        };
        if self.has_one_node() {
            self.propose_ring(&mut alone);
            return alone;
        }
        let ring = match self.obstacle_to_ring() {
            Some(why) => Err(why),
            None => self
                .ring()
                .plan("no node holds the model")
                .map_err(|error| error.to_string()),
        };
        let why = match ring {
            Ok(mut ring) if ring.group_of("decode-0").len() > 1 => {
                if self.prefers(&ring, &alone) {
                    let one_node = of_one_node(reader, &alone, &ring);
                    ring.not_chosen.insert(0, one_node);
                    return ring;
                }
                let ring = of_ring(&ring, &alone);
                format!(
                    "{ring}: not {LEAST_GAIN} times as fast, and with more machines that may fail"
                )
            }
            // One member alone is the best ring; what others would do to it is said first.
            Ok(one) => match one.not_chosen.first() {
                Some(slower) => format!("a piped ring: {slower}"),
                None => return alone,
            },
            Err(why) => format!("a piped ring: {why}"),
        };
        alone.not_chosen.push(why);
        alone
    }

    /// Says what a ring of the node's CPUs and GPUs would do, which Auto does not make.
    fn propose_ring(&self, alone: &mut InferencePlanSpec) {
        let mut others = alone.not_chosen.iter();
        let (true, Some(place)) = (
            self.has_usable_gpus(),
            others.position(|other| other.starts_with(RING_OF_ONE_NODE)),
        ) else {
            return;
        };
        if let Some(ring) = self.ring_without_obstacles() {
            let why = self.obstacles_to_ring_of_one_node();
            alone.not_chosen[place] = format!("{}: {why}", of_ring(&ring, alone));
        }
    }

    /// Whether a ring is enough faster, and misses no objective for the first token that one node meets.
    fn prefers(&self, ring: &InferencePlanSpec, alone: &InferencePlanSpec) -> bool {
        let asked = self.input.spec.objectives.time_to_first_token;
        let meets = |plan: &InferencePlanSpec| {
            asked.is_none_or(|time| plan.predicted.ttft_ms <= time.as_millis_f64())
        };
        ring.predicted.tpot_ms * LEAST_GAIN <= alone.predicted.tpot_ms
            && (meets(ring) || !meets(alone))
    }

    fn has_one_node(&self) -> bool {
        self.estimator.nodes().len() < 2
    }

    /// Why Auto may not plan a ring: the spec asks for what a ring lacks.
    fn obstacle_to_ring(&self) -> Option<String> {
        let spec = self.input.spec;
        let candidates = self.asked.candidates(false, self.demand.reader_version);
        let mut errors = match candidates.contains(&Devices::CPUS) {
            true => Vec::new(),
            false => piped_ring::prompts_on_gpus(spec),
        };
        errors.extend(piped_ring::contradictions(spec));
        words_of(&errors)
    }

    /// What to write for a ring of a single node's CPUs and GPUs.
    fn obstacles_to_ring_of_one_node(&self) -> String {
        let others = words_of(&piped_ring::refused_fields(self.input.spec));
        let all = [Some(OF_ONE_NODE.to_owned()), others];
        all.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }
}

fn words_of(errors: &[FieldError]) -> Option<String> {
    let words = errors.iter();
    let words = words.map(|it| format!("{} {}: {}", it.field, it.problem, it.remedy));
    words.reduce(|all, error| format!("{all}; {error}"))
}

/// What one node would have done instead of a ring.
fn of_one_node(reader: &PlanRank, alone: &InferencePlanSpec, ring: &InferencePlanSpec) -> String {
    format!(
        "{} alone: {} of the weights have no room in its memory and are read from its disk: predicted TPOT {} against {}, TTFT {} against {}",
        reader.node,
        format_bytes(reader.disk_weight_bytes()),
        ms(alone.predicted.tpot_ms),
        ms(ring.predicted.tpot_ms),
        ms(alone.predicted.ttft_ms),
        ms(ring.predicted.ttft_ms),
    )
}

/// What a ring would have done instead of one node.
fn of_ring(ring: &InferencePlanSpec, alone: &InferencePlanSpec) -> String {
    let members = ring.group_of("decode-0");
    let mut nodes: Vec<&str> = members.iter().map(|rank| &*rank.node).collect();
    nodes.dedup();
    format!(
        "a piped ring over {}: predicted TPOT {} against {}, TTFT {} against {}",
        nodes.join(", "),
        ms(ring.predicted.tpot_ms),
        ms(alone.predicted.tpot_ms),
        ms(ring.predicted.ttft_ms),
        ms(alone.predicted.ttft_ms),
    )
}
