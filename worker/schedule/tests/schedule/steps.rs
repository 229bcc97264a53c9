//! Arbitrary calls in arbitrary order, step by step, on a device that detects every mistake.

use std::collections::{BTreeMap, VecDeque};

use crate::simulator::device::{Device, expected_answer};
use crate::simulator::{decode_rows, rows_of};
use hearth_kvcache::KvCache;
use hearth_schedule::{
    Phase, Provenance, Request, Sampled, Scheduler, SchedulerOptions, SequenceId, SpanKind, Step,
    StepResult, StepSpan, Work,
};
use proptest::prelude::*;

const BLOCK_TOKENS: usize = 4;

#[derive(Clone, Debug)]
enum Op {
    /// Prompt, tokens generated before, tokens to come.
    Submit(Vec<u32>, Vec<u32>, usize, Work),
    /// A step; the flag makes the forward pass fail.
    Step(bool),
    /// A step is launched, on top of those in flight if there are any.
    Launch,
    /// The first step in flight lands.
    Land,
    Cancel(usize),
    /// A prompt arrives.
    Import(usize),
    ExportDone(usize),
}

fn ops(works: Vec<Work>) -> impl Strategy<Value = Vec<Op>> {
    let tokens = prop::collection::vec(0u32..2, 1..14);
    let op = prop_oneof![
        4 => (tokens, prop::collection::vec(0u32..2, 0..6), 1usize..12, prop::sample::select(works))
            .prop_map(|(t, g, n, w)| Op::Submit(t, g, n, w)),
        6 => prop::bool::weighted(0.1).prop_map(Op::Step),
        6 => Just(Op::Launch),
        4 => Just(Op::Land),
        1 => any::<usize>().prop_map(Op::Cancel),
        3 => any::<usize>().prop_map(Op::Import),
        3 => any::<usize>().prop_map(Op::ExportDone),
    ];
    prop::collection::vec(op, 1..100)
}

struct World {
    options: SchedulerOptions,
    blocks: usize,
    scheduler: Scheduler,
    device: Device,
    in_flight: VecDeque<Step>,
    requests: BTreeMap<SequenceId, Request>,
    answers: BTreeMap<SequenceId, Vec<u32>>,
    finished: Vec<SequenceId>,
}

impl World {
    fn new(options: SchedulerOptions, blocks: usize) -> Self {
        let kv = KvCache::new(blocks, BLOCK_TOKENS).unwrap();
        Self {
            options,
            blocks,
            scheduler: Scheduler::new(options, kv).unwrap(),
            device: Device::new(blocks, BLOCK_TOKENS),
            in_flight: VecDeque::new(),
            requests: BTreeMap::new(),
            answers: BTreeMap::new(),
            finished: Vec::new(),
        }
    }

    fn live(&self) -> Vec<SequenceId> {
        let ids = self.requests.keys().copied();
        ids.filter(|id| self.scheduler.phase(*id).is_some())
            .collect()
    }

    fn in_phase(&self, phase: Phase) -> Vec<SequenceId> {
        let mut ids = self.live();
        ids.retain(|id| self.scheduler.phase(*id) == Some(phase));
        ids
    }

    fn apply(&mut self, op: Op) {
        let pick = |ids: Vec<SequenceId>, i: usize| (!ids.is_empty()).then(|| ids[i % ids.len()]);
        match op {
            Op::Submit(prompt, mut generated, max_new_tokens, work) => {
                if work == Work::Export {
                    generated.clear();
                }
                let request = Request {
                    prompt,
                    generated,
                    max_new_tokens,
                    work,
                };
                if let Ok(id) = self.scheduler.submit(request.clone()) {
                    self.requests.insert(id, request);
                }
            }
            Op::Step(fails) => self.step(fails),
            Op::Launch => self.launch(),
            Op::Land => self.land(),
            Op::Cancel(i) => {
                if let Some(id) = pick(self.live(), i) {
                    assert!(self.scheduler.cancel(id));
                }
            }
            Op::Import(i) => {
                if let Some(id) = pick(self.in_phase(Phase::WaitingKv), i) {
                    self.import(id);
                }
            }
            Op::ExportDone(i) => {
                if let Some(id) = pick(self.in_phase(Phase::Exporting), i) {
                    self.scheduler.export_done(id).unwrap();
                    self.finished.push(id);
                }
            }
        }
    }

    fn import(&mut self, id: SequenceId) {
        let target = self.scheduler.import_target(id).unwrap();
        let written = &target.blocks[target.first_token / BLOCK_TOKENS..];
        for span in self.in_flight.iter().flat_map(|step| &step.spans) {
            // What the step reads for a sequence that has ended is of no use to anybody.
            let is_alive = self.scheduler.phase(span.sequence).is_some();
            let from = if is_alive {
                0
            } else {
                span.start / BLOCK_TOKENS
            };
            for block in &span.blocks[from..] {
                assert!(
                    !written.contains(block),
                    "an import writes where a step in flight is"
                );
            }
        }
        let Request { prompt, work, .. } = self.requests[&id].clone();
        let token = self.device.import(&target, &prompt, work.prompt()).unwrap();
        let is_first = self.scheduler.tokens(id).unwrap().len() == prompt.len();
        let sampled = is_first.then(|| self.emit(id, token));
        let finished = self.scheduler.import_done(id, sampled).unwrap();
        self.finished.extend(finished.map(|f| f.sequence));
    }

    fn emit(&mut self, sequence: SequenceId, token: u32) -> Sampled {
        self.answers.entry(sequence).or_default().push(token);
        Sampled {
            sequence,
            token,
            last: false,
        }
    }

    /// A step with nothing else in flight.
    fn step(&mut self, fails: bool) {
        while !self.in_flight.is_empty() {
            self.land();
        }
        self.launch();
        match fails {
            true => self.fail(),
            false => self.land(),
        }
    }

    /// Launches a step; the device computes it when it lands.
    fn launch(&mut self) {
        let step = if self.in_flight.is_empty() {
            let step = self.scheduler.schedule();
            self.check_step(&step);
            step
        } else {
            let Some(step) = self.scheduler.schedule_ahead() else {
                return;
            };
            assert_eq!(decode_rows(&step), step.rows());
            assert!(step.admitted.is_empty() && step.preempted.is_empty());
            step
        };
        self.in_flight.push_back(step);
        // No two sequences share a block that a step in flight writes to, whether they live or have ended.
        let mut writers = BTreeMap::new();
        for span in self.in_flight.iter().flat_map(|step| &step.spans) {
            for block in &span.blocks[span.start / BLOCK_TOKENS..] {
                assert_eq!(
                    *writers.entry(*block).or_insert(span.sequence),
                    span.sequence
                );
            }
        }
    }

    fn land(&mut self) {
        let Some(step) = self.in_flight.pop_front() else {
            return;
        };
        let mut result = StepResult {
            step: step.number,
            sampled: Vec::new(),
        };
        for span in &step.spans {
            let token = self.device.compute(span).unwrap();
            let is_alive = self.scheduler.phase(span.sequence).is_some();
            let export = self.requests[&span.sequence].work == Work::Export;
            if span.wants_logits && !export && is_alive {
                let sampled = self.emit(span.sequence, token);
                result.sampled.push(sampled);
            }
        }
        let update = self.scheduler.update(result).unwrap();
        self.finished
            .extend(update.finished.iter().map(|f| f.sequence));
    }

    /// All steps in flight are computed, and nothing of it is of any use.
    fn fail(&mut self) {
        for step in std::mem::take(&mut self.in_flight) {
            for span in &step.spans {
                self.device.compute(span).unwrap();
            }
        }
    }

    fn check_step(&self, step: &Step) {
        let decodes = rows_of(step, SpanKind::Decode);
        assert!(decodes <= self.options.max_batch);
        let prompts = step.spans.iter().filter(|s| s.kind == SpanKind::Prefill);
        let is_alone = prompts.clone().count() == 1 && self.options.whole_prompts;
        let most = match self.options.idle_chunk_tokens {
            Some(idle) if decodes == 0 => idle.max(self.options.chunk_tokens),
            _ => self.options.chunk_tokens,
        };
        assert!(is_alone || rows_of(step, SpanKind::Prefill) <= most);
        let is_whole = |span: &StepSpan| span.wants_logits || !self.options.whole_prompts;
        assert!(prompts.clone().all(is_whole), "a prompt was cut: {step:?}");
        let decoders = self.live().into_iter().filter(|id| {
            self.requests[id].work != Work::Export
                && self.scheduler.phase(*id) != Some(Phase::Waiting)
        });
        assert!(decoders.count() <= self.options.max_batch);
        // One span per sequence, and no two write to the same block.
        let mut ids: Vec<_> = step.spans.iter().map(|s| s.sequence).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), step.spans.len());
        let mut written: Vec<_> = step
            .spans
            .iter()
            .flat_map(|s| &s.blocks[s.start / BLOCK_TOKENS..])
            .collect();
        let count = written.len();
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), count, "two spans write into one block");
        // Every decoding sequence gets a row, unless an import or an export holds the blocks that it needs.
        let held = self.live().into_iter().any(|id| {
            self.scheduler.phase(id) == Some(Phase::WaitingKv)
                || self.requests[&id].work != Work::Generate
        });
        if !held && let Some(oldest) = self.live().first() {
            assert!(ids.contains(oldest), "the oldest of all stands still");
        }
        let stats = self.scheduler.stats().kv;
        assert_eq!(
            stats.used_blocks + stats.cached_blocks + stats.free_blocks,
            self.blocks
        );
    }

    fn check_answers(&self) {
        for (id, answer) in &self.answers {
            let request = &self.requests[id];
            let expected = expected_answer(request, answer.len(), BLOCK_TOKENS);
            assert_eq!(answer, &expected, "{id:?} after {:?}", request.work);
            assert!(answer.len() <= request.max_new_tokens);
            if let Some(tokens) = self.scheduler.tokens(*id) {
                let before = request.prompt.len() + request.generated.len();
                assert_eq!(tokens[before..], *answer);
            }
        }
        for id in &self.finished {
            let request = &self.requests[id];
            if request.work != Work::Export {
                assert_eq!(self.answers[id].len(), request.max_new_tokens);
            }
        }
    }

    /// Runs everything that is left to its end, in a bounded number of steps.
    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.land();
        }
        // That a step has failed is known with the next one, which frees what ended sequences left to it.
        self.step(false);
        let left = self.live().len();
        for _ in 0..2000 {
            for id in self.in_phase(Phase::WaitingKv) {
                self.import(id);
            }
            for id in self.in_phase(Phase::Exporting) {
                self.scheduler.export_done(id).unwrap();
            }
            if self.scheduler.is_idle() {
                assert_eq!(self.scheduler.stats().kv.used_blocks, 0, "a block leaked");
                return;
            }
            self.step(false);
        }
        panic!("{left} sequences do not end");
    }
}

fn play(max_batch: usize, chunk: (usize, bool), blocks: usize, ops: Vec<Op>) {
    let (chunk_tokens, whole_prompts) = chunk;
    let options = SchedulerOptions {
        max_batch,
        chunk_tokens,
        idle_chunk_tokens: Some(2 * chunk_tokens).filter(|tokens| tokens % 4 == 0),
        whole_prompts,
        max_waiting: 8,
    };
    let mut world = World::new(options, blocks);
    for op in ops {
        world.apply(op);
        world.check_answers();
    }
    world.drain();
    world.check_answers();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_answer_is_the_one_of_an_undisturbed_run(
        max_batch in 1usize..5, chunk in (1usize..12, any::<bool>()), blocks in 6usize..16,
        ops in ops(vec![
            Work::Generate, Work::Generate, Work::ImportThenGenerate(Provenance(0)),
            Work::ImportThenGenerate(Provenance(1)), Work::ImportThenGenerate(Provenance(2)), Work::Export,
        ]),
    ) {
        play(max_batch, chunk, blocks, ops);
    }

    #[test]
    fn the_oldest_never_stands_still(
        max_batch in 1usize..5, chunk in (1usize..12, any::<bool>()), blocks in 6usize..12,
        ops in ops(vec![Work::Generate]),
    ) {
        play(max_batch, chunk, blocks, ops);
    }
}
