//! Keys and values that are passed on within a site: the same bits, and each piece once over the way between two sites.

use std::collections::BTreeMap;

use hearth_kernels::{BlockId, KvDType, Span};
use hearth_model::ExpertParallel::{Ep, SmallEp};
use hearth_model::{Sharing, Sites};

use crate::harness::{Sent, share};
use crate::support::{Files, run_whole};

const LAYERS: usize = 2;
/// Rows of the pass whose bytes are counted: each rank of 2, 4 or 8 has as many as any other.
const ROWS: usize = 160;

/// The site of each rank: of machines of equal and of unequal numbers of GPUs, in their order and mixed.
const SITES: [&[u32]; 9] = [
    &[0, 1],
    &[0, 0],
    &[0, 0, 1],
    &[0, 1, 0],
    &[0, 0, 1, 1],
    &[0, 1, 1, 0],
    &[0, 0, 0, 0, 1, 1, 1, 1],
    &[0, 1, 2, 0, 1, 2, 0, 0],
    &[0, 1, 1, 1, 1, 1, 1, 1],
];

fn sharing(sites: &[u32]) -> Sharing {
    let experts = match sites.len() {
        3 => Ep,
        _ => SmallEp,
    };
    Sharing {
        sites: Sites::new(sites.to_vec()),
        ..Sharing::new(experts, sites.len())
    }
}

#[test]
fn ranks_give_the_bits_of_one_whichever_way_keys_and_values_take() {
    for (case, expands) in [
        ("deepseek_v3", false),
        ("deepseek_v3", true),
        ("qwen3_moe", false),
    ] {
        let mut files = Files::of(case, LAYERS);
        files.expands = expands;
        let want = run_whole(&files);
        for sites in SITES {
            let (got, _) = share(&files, sharing(sites), |head, _| head.answers().unwrap());
            assert!(got == want, "{case}, expanded: {expands}, sites {sites:?}");
        }
    }
}

/// A prompt of fewer rows than ranks: some ranks have none, and pass on what others have.
#[test]
fn ranks_without_rows_pass_on_what_others_have() {
    let files = Files::of("deepseek_v3", LAYERS);
    for rows in 1..6 {
        let tokens: Vec<u32> = (0..rows as u32).map(|i| 3 + 5 * i).collect();
        let logits = |sharing| {
            let chunk = share(&files, sharing, |head, _| head.chunk(&tokens, span(rows)));
            chunk.0.unwrap()
        };
        let want = logits(Sharing::new(SmallEp, 4));
        assert_eq!(logits(sharing(&[0, 0, 1, 1])), want, "{rows} rows");
    }
}

fn span(rows: usize) -> Vec<Span> {
    vec![Span {
        first_row: 0,
        rows,
        start: 0,
        blocks: (0..10).map(BlockId).collect(),
    }]
}

/// Bytes of keys and values that a prompt sends.
fn kv_sent(files: &Files, sharing: Sharing) -> BTreeMap<(usize, usize), usize> {
    let vocab = files.config.vocab_size;
    let tokens: Vec<u32> = (0..ROWS)
        .map(|i| ((i * 37 + i * i % 11) % vocab) as u32)
        .collect();
    let sent: Sent = share(files, sharing, |head, _| {
        head.chunk(&tokens, span(ROWS)).unwrap()
    })
    .1;
    let mut kv = BTreeMap::new();
    for ((from, to, kind), bytes) in sent {
        if kind.starts_with("Kv") {
            *kv.entry((from, to)).or_insert(0) += bytes;
        }
    }
    kv
}

#[test]
fn each_piece_goes_between_two_sites_once_and_to_each_rank_once() {
    let files = Files::of("deepseek_v3", LAYERS);
    let layout = hearth_model::kv_layout(&files.config, 16, KvDType::Bf16).unwrap();
    for sites in [
        &[0, 1][..],
        &[0, 0, 1, 1],
        &[0, 1, 0, 1],
        &[0, 0, 0, 0, 1, 1, 1, 1],
    ] {
        let ranks = sites.len();
        let piece = LAYERS * ROWS / ranks * layout.token_layer_bytes();
        let sent = kv_sent(&files, sharing(sites));
        for rank in 0..ranks {
            let come: usize = pairs(&sent, |(_, to)| to == rank);
            assert_eq!(come, (ranks - 1) * piece, "{sites:?}: to {rank}");
        }
        // Of two sites: those of one rank go to one of the other, and there to all others.
        let here = ranks / 2;
        let between = |(from, to): (usize, usize)| sites[from] != sites[to];
        assert_eq!(pairs(&sent, between), 2 * here * piece, "{sites:?}");
        for ((from, to), bytes) in &sent {
            let want = match sites[*from] == sites[*to] {
                // Its own, and what it passes on of one rank elsewhere.
                true => 2 * piece,
                false => piece,
            };
            assert_eq!(*bytes, want, "{sites:?}: {from} to {to}");
        }
        // From each to each, the way between two sites has them once for each rank there.
        let gathered = kv_sent(&files, Sharing::new(SmallEp, ranks));
        assert_eq!(pairs(&gathered, between), 2 * here * here * piece);
    }
}

fn pairs(sent: &BTreeMap<(usize, usize), usize>, is_one: impl Fn((usize, usize)) -> bool) -> usize {
    let of = sent.iter().filter(|(pair, _)| is_one(**pair));
    of.map(|(_, bytes)| bytes).sum()
}
