//! Bytes that each pair of ranks exchanges in each direction (OSDI '26, section 3.2).

use hearth_formats::MoeConfig;
use hearth_kernels::{BlockId, Span};
use hearth_model::ExpertParallel::{self, Ep, SmallEp};

use crate::harness::{Sent, in_group};
use crate::support::Files;

/// Most ranks of a group.
const MOST_RANKS: usize = 8;
/// Most rows of the pass.
const ROWS: usize = 160;
const LAYERS: usize = 2;

/// Rows of the pass, of which each rank has as many as any other: the prompt is cut into two pieces for each.
fn rows(ranks: usize) -> usize {
    ROWS / (2 * ranks) * (2 * ranks)
}

/// What a prompt sends.
fn sent(files: &Files, ranks: usize, how: ExpertParallel) -> Sent {
    let vocab = files.config.vocab_size;
    let rows = rows(ranks);
    let tokens: Vec<u32> = (0..rows)
        .map(|i| ((i * 37 + i * i % 11) % vocab) as u32)
        .collect();
    let spans = vec![Span {
        first_row: 0,
        rows,
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
    for ranks in 2..=MOST_RANKS {
        let sent = sent(&files, ranks, SmallEp);
        // 4 N D / S for each pair and direction, in each layer.
        let want = vec![LAYERS * 4 * rows(ranks) * hidden / ranks; ranks * (ranks - 1)];
        assert_eq!(of(&sent, "Tokens"), want);
        assert_eq!(of(&sent, "Sums"), want);
        let choices = LAYERS * 8 * rows(ranks) * moe(&files).experts_per_token / ranks;
        assert_eq!(of(&sent, "Choices"), vec![choices; ranks * (ranks - 1)]);
    }
}

#[test]
fn ep_sends_a_row_for_each_choice_there_and_back() {
    for ranks in 2..=MOST_RANKS {
        // Routers of random weights prefer some experts a little, which spreads pairs wider than chance: the farthest of these is 5.02
        // sigma away.
        each_choice_is_a_row(&with_eight_choices(ranks), ranks, 6.0);
    }
}

/// Two ranks, and tokens that choose 8 of 64 experts, as in section 3.2 of the paper and its figure 6.
#[test]
fn two_ranks_of_tokens_with_eight_choices_send_what_the_formulas_say() {
    const RANKS: usize = 2;
    let files = with_eight_choices(RANKS);
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
    each_choice_is_a_row(&files, RANKS, 3.0);
}

/// Tokens that choose 8 of some 64 experts, of which each rank has as many as any other. Of random weights, routers choose all
/// experts about as often, if not quite.
fn with_eight_choices(ranks: usize) -> Files {
    Files::edited("qwen3_moe", LAYERS, |config| {
        config["num_experts"] = (64 / ranks * ranks).into();
        config["num_experts_per_tok"] = 8.into();
    })
}

/// That EP sends a row for each choice of another rank's expert, however many of a row are of one rank, and gets one back; and that
/// these are about as many as if all experts were chosen as often, for each pair so many sigma at most from that.
fn each_choice_is_a_row(files: &Files, ranks: usize, most_sigmas: f64) {
    let moe = moe(files);
    let row_bytes = 4 * files.config.hidden_size;
    let sent = sent(files, ranks, Ep);
    let there = of(&sent, "Dispatched");
    assert_eq!(there.len(), ranks * (ranks - 1));
    let choices = of(&sent, "Choices").into_iter();
    let rows_of_choices: Vec<usize> = choices.map(|bytes| bytes / 8 * row_bytes).collect();
    assert_eq!(there, rows_of_choices);
    for ((from, to, _), bytes) in sent.iter().filter(|((.., kind), _)| kind == "Dispatched") {
        let back = sent[&(*to, *from, "Combined".to_owned())];
        assert_eq!(back, *bytes, "{ranks} ranks: {from} to {to}");
    }
    // 4 N A D / S² for each pair and direction, in each layer.
    let want_bytes = LAYERS * row_bytes * rows(ranks) * moe.experts_per_token / (ranks * ranks);
    // Each row of a rank chooses A of the experts without putting one back, of which an S-th are the other rank's: a
    // hypergeometric number.
    let [top_k, experts, share] = [moe.experts_per_token, moe.experts, ranks].map(|it| it as f64);
    let variance_of_row =
        top_k * (share - 1.0) / (share * share) * (experts - top_k) / (experts - 1.0);
    let variance = variance_of_row * (LAYERS * rows(ranks) / ranks) as f64;
    let want = want_bytes as f64 / row_bytes as f64;
    for bytes in &there {
        let choices = (bytes / row_bytes) as f64;
        let sigmas = (choices - want) / variance.sqrt();
        assert!(
            sigmas.abs() < most_sigmas,
            "{ranks} ranks: {choices} of {want}: {sigmas:.2} sigma"
        );
    }
    let ratio = there.iter().sum::<usize>() as f64 / (want_bytes * there.len()) as f64;
    assert!((0.9..1.1).contains(&ratio), "{ranks} ranks: {ratio}");
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
