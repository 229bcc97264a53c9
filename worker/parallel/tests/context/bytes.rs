//! Bytes that each pair of ranks exchanges in each direction (OSDI '26, section 3.2).

use hearth_formats::MoeConfig;
use hearth_kernels::{BlockId, Span};
use hearth_model::ExpertParallel::{self, Ep, SmallEp};

use crate::harness::{Sent, in_group};
use crate::support::Files;

/// Rows of the pass: each rank of up to 8 has as many as any other.
const ROWS: usize = 160;
const LAYERS: usize = 2;

/// What a prompt sends.
fn sent(files: &Files, ranks: usize, how: ExpertParallel) -> Sent {
    let vocab = files.config.vocab_size;
    let tokens: Vec<u32> = (0..ROWS)
        .map(|i| ((i * 37 + i * i % 11) % vocab) as u32)
        .collect();
    let spans = vec![Span {
        first_row: 0,
        rows: ROWS,
        start: 0,
        blocks: (0..10).map(BlockId).collect(),
    }];
    in_group(files, (ranks, how), |head, _| {
        head.chunk(&tokens, spans).unwrap()
    })
    .1
}

fn of(sent: &Sent, kind: &str) -> Vec<usize> {
    let of_kind = sent.iter().filter(|((_, _, of), _)| of == kind);
    of_kind.map(|(_, bytes)| *bytes).collect()
}

fn moe(files: &Files) -> &MoeConfig {
    files.config.moe.as_ref().unwrap()
}

#[test]
fn small_ep_sends_rows_and_sums_once_whatever_the_tokens_choose() {
    let files = Files::of("qwen3_moe", LAYERS);
    let hidden = files.config.hidden_size;
    for ranks in [2, 4, 5, 8] {
        let sent = sent(&files, ranks, SmallEp);
        // 4 N D / S for each pair and direction, in each layer.
        let want = vec![LAYERS * 4 * ROWS * hidden / ranks; ranks * (ranks - 1)];
        assert_eq!(of(&sent, "Tokens"), want);
        assert_eq!(of(&sent, "Sums"), want);
        let choices = LAYERS * 8 * ROWS * moe(&files).experts_per_token / ranks;
        assert_eq!(of(&sent, "Choices"), vec![choices; ranks * (ranks - 1)]);
    }
}

#[test]
fn ep_sends_a_row_for_each_choice_there_and_back() {
    let files = Files::of("qwen3_moe", LAYERS);
    let hidden = files.config.hidden_size;
    let top_k = moe(&files).experts_per_token;
    for ranks in [2, 4] {
        let sent = sent(&files, ranks, Ep);
        let (there, back) = (of(&sent, "Dispatched"), of(&sent, "Combined"));
        // Each choice of another rank's expert is a row, and comes back as one.
        assert_eq!(there.iter().sum::<usize>(), back.iter().sum::<usize>());
        // 4 N A D / S² for each pair and direction, in each layer, if all experts are chosen as often.
        let want = (LAYERS * 4 * ROWS * top_k * hidden / (ranks * ranks)) as f64;
        for bytes in there.iter().chain(&back) {
            let ratio = *bytes as f64 / want;
            assert!((0.5..1.5).contains(&ratio), "{ranks} ranks: {ratio}");
        }
        let mean = there.iter().sum::<usize>() as f64 / there.len() as f64;
        assert!(
            (0.8..1.2).contains(&(mean / want)),
            "{ranks} ranks: {}",
            mean / want
        );
    }
}

/// Two ranks, and tokens that choose 8 of 64 experts, as in section 3.2 of the paper and its figure 6. Of random weights, routers choose all experts
/// about as often.
#[test]
fn two_ranks_of_tokens_with_eight_choices_send_what_the_formulas_say() {
    const RANKS: usize = 2;
    let files = Files::edited("qwen3_moe", LAYERS, |config| {
        config["num_experts"] = 64.into();
        config["num_experts_per_tok"] = 8.into();
    });
    let (hidden, top_k) = (files.config.hidden_size, moe(&files).experts_per_token);
    assert_eq!((top_k, moe(&files).experts), (8, 64));

    let small = sent(&files, RANKS, SmallEp);
    let rows_bytes = LAYERS * 4 * ROWS * hidden / RANKS;
    assert_eq!(of(&small, "Tokens"), [rows_bytes; RANKS]);
    assert_eq!(of(&small, "Sums"), [rows_bytes; RANKS]);
    assert_eq!(
        of(&small, "Choices"),
        [LAYERS * 8 * ROWS * top_k / RANKS; RANKS]
    );

    let all = sent(&files, RANKS, Ep);
    // Each row of a rank chooses 8 of 64 without putting one back, of which 32 are the other rank's: a hypergeometric number.
    let rows = (LAYERS * ROWS / RANKS) as f64;
    let (mean, variance) = (rows * 4.0, rows * 8.0 * 0.25 * 56.0 / 63.0);
    for kind in ["Dispatched", "Combined"] {
        let bytes = of(&all, kind);
        assert_eq!(bytes.len(), RANKS);
        for bytes in bytes {
            assert_eq!(bytes % (4 * hidden), 0, "{kind}: whole rows");
            let choices = (bytes / (4 * hidden)) as f64;
            let sigmas = (choices - mean) / variance.sqrt();
            assert!(
                sigmas.abs() < 3.0,
                "{kind}: {choices} of {mean}: {sigmas:.2} sigma"
            );
        }
    }
    // As many come back as went there.
    let total = |kind| of(&all, kind).iter().sum::<usize>();
    assert_eq!(total("Dispatched"), total("Combined"));
}

#[test]
fn keys_and_values_go_to_each_rank_once_as_they_are_stored() {
    let files = Files::of("deepseek_v3", LAYERS);
    let sent = sent(&files, 4, SmallEp);
    let layout = hearth_model::kv_layout(&files.config, 16, hearth_kernels::KvDType::Bf16);
    // Each rank has a row in eight of the first half, and as many of the second.
    let want = LAYERS * ROWS / 8 * layout.unwrap().token_layer_bytes();
    assert_eq!(of(&sent, "Kv"), vec![want; 12]);
    assert_eq!(of(&sent, "KvBehind"), vec![want; 12]);
}

#[test]
fn each_rank_says_that_it_has_come_to_the_end_of_a_pass() {
    // The last layer is a dense one: nothing else of it comes back to the head.
    let files = Files::of("qwen3", LAYERS);
    // The one row whose logits are wanted is the head's.
    assert_eq!(of(&sent(&files, 4, SmallEp), "Last"), vec![0; 3]);
}
