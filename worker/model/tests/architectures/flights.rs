//! Passes that stop between modules, and passes in tiles of rows: the bits are those of the plain program.

use hearth_kernels::{CpuBackend, Isa, KvDType, Span};
use hearth_model::{Flight, Rows};

use crate::all_cases;
use crate::harness::{Golden, Runner, Sequence, isas};

all_cases!(interleaved, tiled);

const PROMPT_TOKENS: usize = 37;

fn tokens(golden: &Golden, number: usize, count: usize) -> Vec<u32> {
    let vocab = golden.config.vocab_size;
    let token = |i: usize| ((i * 31 + 17 * number + i * i % 7) % vocab) as u32;
    (0..count).map(token).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

/// Logits of all rows of two prompts, each by itself.
fn plain(golden: &Golden, isa: Isa) -> [Vec<u32>; 2] {
    [0, 1].map(|number| {
        let mut runner = Runner::new(golden, isa, KvDType::Bf16);
        let mut sequence = runner.sequence(PROMPT_TOKENS);
        let prompt = tokens(golden, number, PROMPT_TOKENS - number);
        let logits = runner.prefill(&mut sequence, &prompt, PROMPT_TOKENS);
        bits(&logits.concat())
    })
}

fn begin(runner: &Runner, sequence: &Sequence, prompt: &[u32]) -> Flight<CpuBackend> {
    let span = Span {
        first_row: 0,
        rows: prompt.len(),
        start: 0,
        blocks: sequence.blocks.clone(),
    };
    runner
        .model
        .begin(Rows::Tokens(prompt), vec![span], &mut ())
        .unwrap()
}

/// Two flights take turns: the first one's attention, the second one's, then their feed-forward blocks.
fn interleaved(case: &str) {
    let golden = Golden::load(case);
    for isa in isas() {
        let mut runner = Runner::new(&golden, isa, KvDType::Bf16);
        let prompts = [0, 1].map(|number| tokens(&golden, number, PROMPT_TOKENS - number));
        let mut flights = prompts.each_ref().map(|prompt| {
            let sequence = runner.sequence(PROMPT_TOKENS);
            begin(&runner, &sequence, prompt)
        });
        let Runner { model, kv, .. } = &mut runner;
        for layer in 0..model.config().layers {
            for flight in &mut flights {
                model.attention(flight, layer, kv, &mut ()).unwrap();
            }
            for flight in flights.iter_mut().rev() {
                model.feed_forward(flight, layer, &mut ()).unwrap();
            }
        }
        let got = flights.map(|flight| {
            let rows: Vec<u32> = (0..flight.rows() as u32).collect();
            let logits = model.end(flight, &rows, &mut ()).unwrap().unwrap();
            bits(logits.as_slice())
        });
        assert!(got == plain(&golden, isa), "{case} {isa}");
    }
}

/// A prompt beside another one, in tiles that cut both.
fn tiled(case: &str) {
    let golden = Golden::load(case);
    let prompts = [0, 1].map(|number| tokens(&golden, number, PROMPT_TOKENS - number));
    for isa in isas() {
        let want = plain(&golden, isa).concat();
        for tile_rows in [1, 7, 36, 73] {
            let mut runner = Runner::new(&golden, isa, KvDType::Bf16);
            runner.model = runner.model.in_row_tiles(tile_rows);
            let [mut first, mut second] = [0, 1].map(|_| runner.sequence(PROMPT_TOKENS));
            let logits = runner.step(&mut [
                (&mut first, &prompts[0][..]),
                (&mut second, &prompts[1][..]),
            ]);
            assert!(
                bits(&logits.concat()) == want,
                "{case} {isa}, tiles of {tile_rows}"
            );
        }
    }
}
