//! Ranks that fail, lie or are lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use hearth_kernels::{BlockId, Span};
use hearth_model::ExpertParallel::{Ep, SmallEp};
use hearth_model::{Batch, Exchanged, ModelError, Observer};
use hearth_parallel::{Op, Tag};

use crate::harness::in_group;
use crate::support::Files;

const LAYERS: usize = 3;
const TOKENS: [u32; 24] = [7; 24];

fn spans() -> Vec<Span> {
    vec![Span {
        first_row: 0,
        rows: TOKENS.len(),
        start: 0,
        blocks: vec![BlockId(3), BlockId(1)],
    }]
}

fn tag(pass: u64, layer: u32, op: Op) -> Tag {
    Tag {
        pass,
        flight: 0,
        layer,
        op,
    }
}

/// Gives a pass up after some of its blocks.
struct GivesUp(usize);

impl<B: hearth_kernels::Backend> Observer<B> for GivesUp {
    fn goes_on(&mut self, done: usize, _: usize) -> bool {
        done < self.0
    }
}

#[test]
fn a_pass_that_is_given_up_leaves_the_ranks_ready_for_the_next() {
    let files = Files::of("deepseek_v3", LAYERS);
    for how in [SmallEp, Ep] {
        in_group(&files, (3, how), |head, _| {
            let want = head.chunk(&TOKENS, spans()).unwrap();
            for after in 0..2 * LAYERS {
                let batch = Batch {
                    tokens: TOKENS.to_vec(),
                    spans: spans(),
                    logit_rows: vec![3],
                };
                let given_up = head
                    .model
                    .forward(&batch, &mut head.kv, &mut GivesUp(after));
                assert!(matches!(given_up, Err(ModelError::GivenUp)));
                assert_eq!(head.chunk(&TOKENS, spans()).unwrap(), want);
            }
        });
    }
}

/// Panics after some blocks of a pass.
struct Panics(usize);

impl<B: hearth_kernels::Backend> Observer<B> for Panics {
    fn goes_on(&mut self, done: usize, _: usize) -> bool {
        assert!(done < self.0, "as the test wants");
        true
    }
}

#[test]
fn a_head_that_panics_in_a_pass_leaves_the_ranks_ready_for_the_next() {
    let files = Files::of("qwen3_moe", LAYERS);
    in_group(&files, (3, SmallEp), |head, _| {
        let want = head.chunk(&TOKENS, spans()).unwrap();
        for after in [0, 1, LAYERS] {
            let batch = Batch {
                tokens: TOKENS.to_vec(),
                spans: spans(),
                logit_rows: vec![3],
            };
            let run = || head.model.forward(&batch, &mut head.kv, &mut Panics(after));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
            assert_eq!(head.chunk(&TOKENS, spans()).unwrap(), want);
        }
    });
}

#[test]
fn a_rank_that_cannot_do_its_part_ends_the_pass_for_all_and_no_more() {
    let files = Files::of("qwen3_moe", LAYERS);
    in_group(&files, (4, SmallEp), |head, _| {
        let want = head.chunk(&TOKENS, spans()).unwrap();
        // A block that no cache has.
        let mut wrong = spans();
        wrong[0].blocks[1] = BlockId(99);
        let error = head.chunk(&TOKENS, wrong).unwrap_err();
        assert!(!matches!(error, ModelError::Group { .. }), "{error}");
        assert_eq!(head.chunk(&TOKENS, spans()).unwrap(), want);
    });
}

#[test]
fn a_rank_that_lies_is_named() {
    let files = Files::of("qwen3_moe", LAYERS);
    in_group(&files, (2, SmallEp), |head, group| {
        // Before the follower's own message comes this one, as if from it: the head's first pass has number 0.
        let kv = tag(0, 0, Op::Exchange(Exchanged::Kv));
        group.send(0, kv, vec![0; 5]).unwrap();
        group.send(1, kv, vec![0; 5]).unwrap();
        let began = Instant::now();
        let error = head.chunk(&TOKENS, spans()).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(20));
        let text = error.to_string();
        assert!(text.contains("rank 1"), "{text}");
    });
}
