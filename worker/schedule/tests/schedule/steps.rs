//! Arbitrary calls in arbitrary order, step by step, on a device that detects every mistake.

use std::collections::BTreeMap;

use crate::simulator::device::{Device, expected_answer};
use crate::simulator::rows_of;
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
    /// A step with a cancellation while it is computed.
    StepAndCancel(usize),
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
        9 => prop::bool::weighted(0.1).prop_map(Op::Step),
        1 => any::<usize>().prop_map(Op::StepAndCancel),
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
            Op::Step(fails) => self.step(fails, None),
            Op::StepAndCancel(i) => {
                let id = pick(self.live(), i);
                self.step(false, id);
            }
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

    fn step(&mut self, fails: bool, cancel: Option<SequenceId>) {
        let step = self.scheduler.schedule();
        self.check_step(&step);
        let mut result = StepResult {
            step: step.number,
            sampled: Vec::new(),
        };
        if let Some(id) = cancel {
            self.scheduler.cancel(id);
        }
        for span in &step.spans {
            let token = self.device.compute(span).unwrap();
            let export = self.requests[&span.sequence].work == Work::Export;
            // A failed or cancelled span emits nothing.
            if span.wants_logits && !export && !fails && cancel != Some(span.sequence) {
                let sampled = self.emit(span.sequence, token);
                result.sampled.push(sampled);
            }
        }
        if !fails {
            let update = self.scheduler.update(result).unwrap();
            self.finished
                .extend(update.finished.iter().map(|f| f.sequence));
        }
    }

    fn check_step(&self, step: &Step) {
        let decodes = rows_of(step, SpanKind::Decode);
        assert!(decodes <= self.options.max_batch);
        let prompts = step.spans.iter().filter(|s| s.kind == SpanKind::Prefill);
        let is_alone = prompts.clone().count() == 1 && self.options.whole_prompts;
        assert!(is_alone || rows_of(step, SpanKind::Prefill) <= self.options.chunk_tokens);
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
            self.step(false, None);
        }
        panic!("{left} sequences do not end");
    }
}

fn play(max_batch: usize, chunk: (usize, bool), blocks: usize, ops: Vec<Op>) {
    let (chunk_tokens, whole_prompts) = chunk;
    let options = SchedulerOptions {
        max_batch,
        chunk_tokens,
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
