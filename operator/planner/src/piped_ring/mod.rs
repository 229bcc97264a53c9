//! Plans of piped rings (prima.cpp, section 3.1): for a model that no node holds, or where the spec asks for one.
//!
//! Every node's CPUs, and each of its GPUs, may get windows of layers. Each of them in turn is tried as the head, which also has
//! embedding, output head and the first layers; Halda chooses windows and rounds, and leaves out those that would make a token
//! slower.

mod layers;
mod members;
mod problem;
mod refusal;
mod why;
mod write;

use hearth_crds::{
    DualBatch, ExpertCache, FieldError, GpuProfile, InferenceDeploymentSpec, InferencePlanSpec,
    PlanKvType, PrefillMode, RING_VERSION, ScalingSpec, Strategy,
};

use crate::draft::DEFAULT_STALL_MS;
use crate::error::PlanError;
use crate::estimator::Estimator;
use crate::halda::{self, Choice, Limits, RingError, Simulator};
use crate::input::PlanInput;
use crate::memory::Demand;

use members::Members;

/// What a ring is planned from.
#[derive(Clone, Copy)]
pub(crate) struct RingPlanning<'a> {
    pub input: &'a PlanInput<'a>,
    pub demand: &'a Demand<'a>,
    pub estimator: &'a Estimator<'a>,
    pub key_type: PlanKvType,
    pub value_type: PlanKvType,
}

/// A ring that was chosen.
struct Chosen<'a> {
    members: Members<'a>,
    choice: Choice,
    passes: Passes,
    /// Whether nothing else could be a member.
    is_only: bool,
    /// Members that were not taken, each with the reason, which are not in the choice.
    left_out: Vec<String>,
}

impl Chosen<'_> {
    /// Whether a GPU is in the ring.
    fn uses(&self, gpu: &GpuProfile) -> bool {
        let members = self.choice.order.iter().map(|at| &self.members.all[*at]);
        let mut gpus = members.filter_map(|member| member.gpu);
        gpus.any(|room| room.gpu.uuid == gpu.uuid)
    }

    /// Whether any GPU is in the ring.
    fn uses_gpus(&self) -> bool {
        let mut order = self.choice.order.iter();
        order.any(|at| self.members.all[*at].gpu.is_some())
    }

    /// The same, with the reasons that others were not taken.
    fn without(mut self, left_out: Vec<String>) -> Self {
        self.left_out.extend(left_out);
        self
    }

    /// The same, with the reasons that GPUs could not be members, and CPUs not beside those that are.
    fn without_refused(self, gpus: &[String]) -> Self {
        let cpus = self.members.refused_cpus.clone();
        self.without(cpus).without(gpus.to_vec())
    }
}

/// How a prompt passes a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Passes {
    /// Tokens of the prompt by which that is judged.
    prompt_tokens: u32,
    /// Tokens of a chunk, which is a pass, beside streams.
    chunk_tokens: u32,
    /// The same where no stream waits for it.
    idle_chunk_tokens: u32,
    /// Most tokens of a flight.
    flight_tokens: u32,
}

/// Tokens of a chunk of a prompt, best first.
const CHUNKS: [u32; 7] = [1024, 512, 256, 128, 64, 32, 16];
/// Most tokens of a flight, of which the best is taken: shorter ones let more members compute at the same time, and read the
/// weights more often. Members have room for the activations of the longest ones; the CPUs' kernels are slower with fewer than
/// the shortest.
const FLIGHTS: [u32; 3] = [256, 128, 64];
/// Tokens' time for which a chunk may hold up streams where they are slow: shorter chunks would read the weights too often.
const STALL_TOKENS: f64 = 16.0;

/// Checks that a spec asks for nothing that a ring does not have.
///
/// # Errors
/// [`PlanError::Unsupported`] with all fields that do.
pub(crate) fn check(spec: &InferenceDeploymentSpec) -> Result<(), PlanError> {
    if spec.strategy != Strategy::PipedRing {
        return Ok(());
    }
    let errors = refused_fields(spec);
    match errors.is_empty() {
        true => Ok(()),
        false => Err(PlanError::Unsupported(errors)),
    }
}

/// What a spec says that a ring refuses where the spec asks for one.
pub(crate) fn refused_fields(spec: &InferenceDeploymentSpec) -> Vec<FieldError> {
    let mut errors = check_prefill(spec);
    errors.extend(contradictions(spec));
    errors
}

/// What a spec says of GPUs that read prompts: a ring has none.
pub(crate) fn prompts_on_gpus(spec: &InferenceDeploymentSpec) -> Vec<FieldError> {
    let prefill = &spec.prefill;
    let mut errors = Errors::default();
    errors.refuse(
        prefill.mode.streams(),
        "spec.prefill.mode",
        format!("is \"{:?}\"", prefill.mode),
        "a ring reads prompts itself: write Auto or Chunked",
    );
    errors.refuse(
        prefill.gpus_per_worker.is_some_and(|gpus| gpus > 0),
        "spec.prefill.gpusPerWorker",
        format!("is {}", prefill.gpus_per_worker.unwrap_or(0)),
        "a ring reads prompts itself: remove gpusPerWorker, or write 0 for a ring without GPUs",
    );
    errors.0
}

/// What a spec says of prompts' workers: a ring has none.
fn check_prefill(spec: &InferenceDeploymentSpec) -> Vec<FieldError> {
    let prefill = &spec.prefill;
    let mut errors = Errors(prompts_on_gpus(spec));
    errors.refuse(
        prefill.replicas.is_some_and(|replicas| replicas > 0),
        "spec.prefill.replicas",
        format!("is {}", prefill.replicas.unwrap_or(0)),
        "a ring reads prompts itself: remove it",
    );
    errors.refuse(
        prefill.scaling.is_some(),
        "spec.prefill.scaling",
        "is set".to_owned(),
        "a ring reads prompts itself: remove it",
    );
    errors.0
}

/// What a spec asks for that no ring does, whoever chose it. Workers for prompts are not among it: with Auto, a ring that
/// reads prompts itself stands in for them.
pub(crate) fn contradictions(spec: &InferenceDeploymentSpec) -> Vec<FieldError> {
    let (prefill, decode) = (&spec.prefill, &spec.decode);
    let mut errors = Errors::default();
    errors.refuse(
        prefill.chunked_below_tokens.is_some(),
        "spec.prefill.chunkedBelowTokens",
        "has no effect".to_owned(),
        "a ring reads every prompt in chunks: remove it",
    );
    errors.refuse(
        prefill.quiet_window.is_some(),
        "spec.prefill.quietWindow",
        "has no effect".to_owned(),
        "a ring has no GPUs that read prompts together: remove it",
    );
    errors.refuse(
        decode.expert_cache == Some(ExpertCache::On),
        "spec.decode.expertCache",
        "is \"On\"".to_owned(),
        "a member of a ring has all experts of its layers on its own device: write Auto or \"Off\"",
    );
    let replicas = decode.planned_replicas();
    errors.refuse(
        replicas > 1,
        "spec.decode.replicas",
        format!("is {replicas}"),
        "a ring is one decode worker with the stages behind it: write 1",
    );
    let scaling = decode.scaling.as_ref();
    errors.refuse(
        scaling.is_some_and(ScalingSpec::is_dynamic),
        "spec.decode.scaling.mode",
        "is not \"Static\"".to_owned(),
        "a ring is one decode worker with the stages behind it: remove scaling",
    );
    errors.refuse(
        decode.dual_batch == DualBatch::On,
        "spec.decode.dualBatch",
        "is \"On\"".to_owned(),
        "a ring has no half batches: write Auto or \"Off\"",
    );
    errors.0
}

/// A spec without its [`refused_fields`].
pub(crate) fn without_obstacles(spec: &InferenceDeploymentSpec) -> InferenceDeploymentSpec {
    let mut spec = spec.clone();
    let (prefill, decode) = (&mut spec.prefill, &mut spec.decode);
    if prefill.mode.streams() {
        prefill.mode = PrefillMode::Auto;
    }
    prefill.gpus_per_worker = prefill.gpus_per_worker.filter(|gpus| *gpus == 0);
    (prefill.replicas, prefill.scaling) = (None, None);
    prefill.chunked_below_tokens = None;
    prefill.quiet_window = None;
    decode.expert_cache = decode.expert_cache.filter(|it| *it != ExpertCache::On);
    if decode.planned_replicas() > 1 || decode.scaling.as_ref().is_some_and(ScalingSpec::is_dynamic)
    {
        (decode.replicas, decode.scaling) = (Some(1), None);
    }
    if decode.dual_batch == DualBatch::On {
        decode.dual_batch = DualBatch::Auto;
    }
    spec
}

/// Fields that are refused.
#[derive(Default)]
struct Errors(Vec<FieldError>);

impl Errors {
    fn refuse(&mut self, is_wrong: bool, field: &str, is: String, remedy: &str) {
        self.0
            .extend(is_wrong.then(|| FieldError::new(field, is, remedy)));
    }
}

impl RingPlanning<'_> {
    /// The ring with the least predicted time per output token; its plan says in `why` what became of `instead`, the
    /// alternative on single nodes.
    ///
    /// # Errors
    /// [`PlanError`] if no node can be a member, or no ring fits.
    pub(crate) fn plan(&self, instead: &str) -> Result<InferencePlanSpec, PlanError> {
        let all = Members::of(self, &|_| true);
        if all.all.is_empty() {
            return Err(self.nobody(&all));
        }
        let chosen = Chosen {
            is_only: all.all.len() == 1,
            ..self.with_passes(self.choose(&all, Limits::default())?)
        };
        Ok(self.write(&chosen, instead))
    }

    /// The ring with the least time per output token of three: of all that may be members; of these without the GPUs that were
    /// left out, whose processes need no memory then; and of the CPUs alone. Where they take as long, it is the last. Each is chosen
    /// within `limits`.
    fn choose<'a>(&'a self, all: &Members<'a>, limits: Limits) -> Result<Chosen<'a>, PlanError> {
        let refused = &*all.refused_gpus;
        if all.all.iter().all(|member| member.gpu.is_none()) {
            let chosen = self.best(all, limits);
            let chosen = chosen.map_err(|error| self.refusal(all, error))?;
            return Ok(chosen.without_refused(refused));
        }
        let best_of = |may_use: &dyn Fn(&GpuProfile) -> bool| {
            let members = Members::of(self, may_use);
            self.best(&members, limits).ok()
        };
        let on_cpus = best_of(&|_| false);
        let with_gpus = match self.best(all, limits) {
            Ok(with_gpus) => with_gpus,
            Err(error) => {
                let on_cpus = on_cpus.ok_or_else(|| self.refusal(all, error))?;
                let full = why::no_room_beside_gpus(all);
                return Ok(on_cpus.without_refused(refused).without(vec![full]));
            }
        };
        let unused = why::unused_gpus(&with_gpus);
        if !with_gpus.uses_gpus() {
            let on_cpus = on_cpus.unwrap_or(with_gpus);
            return Ok(on_cpus.without_refused(refused).without(unused));
        }
        let fewer = match unused.is_empty() {
            true => None,
            false => best_of(&|gpu| with_gpus.uses(gpu)),
        };
        let is_better = |fewer: &Chosen<'_>| fewer.choice.tpot_ms <= with_gpus.choice.tpot_ms;
        let on_gpus = match fewer.filter(is_better) {
            Some(fewer) => fewer.without(unused),
            None => with_gpus,
        };
        match on_cpus {
            Some(on_cpus) if on_cpus.choice.tpot_ms <= on_gpus.choice.tpot_ms => {
                let slower = why::other_ring("GPUs in the ring", Some(&on_gpus), &on_cpus);
                let slower = slower + &why::left_out_gpus(all, &on_gpus);
                Ok(on_cpus.without_refused(refused).without(vec![slower]))
            }
            on_cpus => {
                let slower = why::other_ring("the CPUs alone", on_cpus.as_ref(), &on_gpus);
                Ok(on_gpus.without_refused(refused).without(vec![slower]))
            }
        }
    }

    /// The best ring of members, whichever of them is its head.
    fn best<'a>(&self, members: &Members<'a>, limits: Limits) -> Result<Chosen<'a>, RingError> {
        let problems = members.problems_by_head(self, self.longest_passes());
        let (head, choice) = halda::choose_head(&problems, limits)?;
        Ok(Chosen {
            members: members.led_by(head),
            choice,
            passes: self.longest_passes(),
            is_only: false,
            left_out: Vec::new(),
        })
    }

    /// The longest passes of prompts, by which rings are compared.
    fn longest_passes(&self) -> Passes {
        let longest = CHUNKS[0].min(self.demand.context_length);
        Passes {
            prompt_tokens: self.estimator.prompt_tokens(),
            chunk_tokens: longest,
            idle_chunk_tokens: longest,
            flight_tokens: FLIGHTS[0].min(longest),
        }
    }

    /// The same ring with the longest chunks of prompts, and the longest that streams bear, in the flights by which a prompt that
    /// has the ring to itself takes the least time.
    fn with_passes<'a>(&self, mut chosen: Chosen<'a>) -> Chosen<'a> {
        let ttft_ms = |passes: Passes| {
            let problem = chosen.members.problem(self, passes);
            Simulator::new(&problem).ttft_ms(&chosen.choice.windows)
        };
        let mut longest = self.longest_passes();
        let is_ring = chosen.size() > 1;
        if !is_ring {
            // A pass is one flight, for which there must be room.
            longest.chunk_tokens = self.demand.chunk_tokens;
            longest.idle_chunk_tokens = self.demand.chunk_tokens;
            longest.flight_tokens = self.demand.chunk_tokens;
        }
        let shorter = FLIGHTS.iter().filter(|_| is_ring).map(|tokens| Passes {
            flight_tokens: longest.flight_tokens.min(*tokens),
            ..longest
        });
        let timed = shorter.map(|passes| (ttft_ms(passes), passes));
        let best = timed.min_by(|(a, _), (b, _)| a.total_cmp(b));
        let (best_ms, mut passes) = best.unwrap_or_else(|| (ttft_ms(longest), longest));

        let asked = self.input.spec.objectives.time_per_output_token;
        let asked_ms = asked.map_or(DEFAULT_STALL_MS, |time| time.as_millis_f64());
        let borne_ms = asked_ms.max(STALL_TOKENS * chosen.choice.tpot_ms);
        for chunk_tokens in CHUNKS.map(|tokens| tokens.min(longest.chunk_tokens)) {
            passes.chunk_tokens = chunk_tokens;
            let one_pass = Passes {
                prompt_tokens: chunk_tokens,
                ..passes
            };
            if ttft_ms(one_pass) <= borne_ms {
                break;
            }
        }
        chosen.passes = passes;
        chosen.choice.ttft_ms = best_ms;
        chosen
    }
}

/// What is said of nodes whose workers are of an earlier version.
fn too_old(nodes: &[&str]) -> String {
    format!(
        "{}: the workers' image there reads no plans of rings (version {RING_VERSION}): renew it",
        nodes.join(", ")
    )
}
