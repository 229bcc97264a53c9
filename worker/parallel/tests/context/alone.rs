//! A head that has all experts, and computes passes with its peers or without them.

use std::time::Duration;

use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::ExpertParallel::{Ep, SmallEp};
use hearth_model::{ExpertParallel, Sharing};

use crate::harness::{Sent, share};
use crate::support::{Files, Head, cache};

const LAYERS: usize = 3;
/// Tokens of a block of the cache.
const BLOCK: usize = 16;

fn tokens(rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|i| 3 + 5 * i % 29).collect()
}

/// Rows of one sequence from a position on, in blocks from `first_block` on.
fn span(start: usize, rows: usize, first_block: u32) -> Vec<Span> {
    let blocks = (start + rows).div_ceil(BLOCK) as u32;
    vec![Span {
        first_row: 0,
        rows,
        start,
        blocks: (first_block..first_block + blocks).map(BlockId).collect(),
    }]
}

fn sharing(how: ExpertParallel, ranks: usize) -> Sharing {
    Sharing {
        is_self_sufficient: true,
        ..Sharing::new(how, ranks)
    }
}

/// What one rank computes of two passes of one sequence.
fn of_one(files: &Files) -> [Vec<f32>; 2] {
    let model = files.with(hearth_model::modules(&files.config).unwrap());
    let kv = cache(&model);
    let mut one = Head { model, kv };
    [
        one.chunk(&tokens(24), span(0, 24, 0)).unwrap(),
        one.chunk(&tokens(9), span(24, 9, 0)).unwrap(),
    ]
}

/// Passes that the head began.
fn passes(sent: &Sent) -> bool {
    sent.keys()
        .any(|(from, _, kind)| *from == 0 && kind == "Pass")
}

#[test]
fn alone_and_together_give_the_same_bits_and_alone_sends_nothing() {
    for (case, how) in [("deepseek_v3", SmallEp), ("qwen3_moe", Ep)] {
        let files = Files::of(case, LAYERS);
        let [want, want_next] = of_one(&files);
        let ((), sent) = share(&files, sharing(how, 4), |head, _| {
            assert!(head.model.computes_alone());
            let got = head.chunk_alone(&tokens(24), &span(0, 24, 0)).unwrap();
            assert_eq!(got, want, "{case}, alone");
            let got = head.chunk_alone(&tokens(9), &span(24, 9, 0)).unwrap();
            assert_eq!(got, want_next, "{case}, alone");
        });
        assert!(!passes(&sent), "{case}: {sent:?}");
        let ((), sent) = share(&files, sharing(how, 4), |head, _| {
            let got = head.chunk(&tokens(24), span(0, 24, 0)).unwrap();
            assert_eq!(got, want, "{case}, together");
            // What was read together is here, too.
            let got = head.chunk_alone(&tokens(9), &span(24, 9, 0)).unwrap();
            assert_eq!(got, want_next, "{case}, alone behind together");
        });
        assert!(passes(&sent), "{case}: {sent:?}");
    }
}

/// Bytes that the head handed to rank 1 of what it had before.
fn before(sent: &Sent) -> usize {
    sent.get(&(0, 1, "Before".to_owned())).copied().unwrap_or(0)
}

/// Bytes of a block in all layers.
fn block_bytes(files: &Files) -> usize {
    let model = files.with(hearth_model::modules(&files.config).unwrap());
    let layout = model.kv_layout(BLOCK, KvDType::Bf16);
    BLOCK * layout.token_layer_bytes() * layout.layers
}

#[test]
fn what_the_others_lack_is_handed_on_before_a_pass_and_once() {
    for (case, ranks) in [("deepseek_v3", 2), ("qwen3_moe", 4)] {
        let files = Files::of(case, LAYERS);
        let [want, want_next] = of_one(&files);
        let ((), sent) = share(&files, sharing(SmallEp, ranks), |head, _| {
            let got = head.chunk_alone(&tokens(24), &span(0, 24, 0)).unwrap();
            assert_eq!(got, want, "{case}");
            let got = head.chunk(&tokens(9), span(24, 9, 0)).unwrap();
            assert_eq!(got, want_next, "{case}");
            // Now they have it.
            head.chunk(&tokens(9), span(24, 9, 0)).unwrap();
        });
        // One block and a half.
        assert_eq!(2 * before(&sent), 3 * block_bytes(&files), "{case}");
        // Blocks that are used again for what is read together are the others', too.
        let ((), sent) = share(&files, sharing(SmallEp, ranks), |head, _| {
            head.chunk_alone(&tokens(24), &span(0, 24, 0)).unwrap();
            assert_eq!(head.chunk(&tokens(24), span(0, 24, 0)).unwrap(), want);
            assert_eq!(head.chunk(&tokens(9), span(24, 9, 0)).unwrap(), want_next);
        });
        assert!(passes(&sent) && before(&sent) == 0, "{case}: {sent:?}");
    }
}

#[test]
fn two_sequences_of_a_pass_are_handed_on_as_far_as_each_is_missing() {
    let files = Files::of("qwen3_moe", LAYERS);
    let ((), sent) = share(&files, sharing(SmallEp, 2), |head, _| {
        head.chunk(&tokens(16), span(0, 16, 0)).unwrap();
        head.chunk_alone(&tokens(16), &span(0, 16, 6)).unwrap();
        let mut both = span(16, 5, 0);
        both.push(Span {
            first_row: 5,
            ..span(16, 4, 6).remove(0)
        });
        let got = head.chunk(&tokens(9), both.clone()).unwrap();
        assert_eq!(head.chunk_alone(&tokens(9), &both).unwrap(), got);
    });
    assert_eq!(before(&sent), block_bytes(&files));
}

/// A member that has come back has nothing of what was read before.
#[test]
fn a_group_that_was_formed_anew_is_handed_what_was_read_together() {
    let files = Files::of("deepseek_v3", LAYERS);
    let [want, want_next] = of_one(&files);
    let ((), sent) = share(&files, sharing(SmallEp, 2), |head, _| {
        assert_eq!(head.chunk(&tokens(24), span(0, 24, 0)).unwrap(), want);
        assert!(head.model.rejoin(Duration::ZERO).unwrap());
        assert_eq!(head.chunk(&tokens(9), span(24, 9, 0)).unwrap(), want_next);
    });
    assert!(before(&sent) > 0, "{sent:?}");
}

#[test]
fn without_its_peers_a_head_goes_on_alone() {
    let files = Files::of("qwen3_moe", LAYERS);
    let [want, want_next] = of_one(&files);
    share(&files, sharing(SmallEp, 2), |head, group| {
        assert_eq!(head.chunk(&tokens(24), span(0, 24, 0)).unwrap(), want);
        group.lose(1, "as the test wants");
        // Whoever asks for the peers gets what the head computes by itself.
        let got = head.chunk(&tokens(9), span(24, 9, 0)).unwrap();
        assert_eq!(got, want_next);
        assert_eq!(head.chunk(&tokens(24), span(0, 24, 5)).unwrap(), want);
    });
}

#[test]
fn ranks_that_give_other_bits_than_one_are_never_left_out() {
    let files = Files::of("qwen3_moe", LAYERS);
    let ((), sent) = share(&files, sharing(SmallEp, 3), |head, _| {
        assert!(!head.model.computes_alone());
        head.chunk_alone(&tokens(24), &span(0, 24, 0)).unwrap();
    });
    assert!(passes(&sent), "{sent:?}");
}
