//! A fake model made of hashes: its KV and its answers depend on every byte of KV before them, so that a wrong block,
//! a lost token or KV of another sequence changes the answer.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use hearth_kernels::{BlockId, KvDType, KvLayout, SampleFault, SampleSpec};
use hearth_model::Batch;

use crate::{
    SamplingParams,
    forward::{Forward, KvBytes, Output, PendingKv, Rejoined, Started, Watch, WeightStats},
    sampler::{History, choose, sample},
    work::StepWork,
};

pub(super) const LAYERS: usize = 2;
pub(super) const BLOCK_TOKENS: usize = 4;

/// Ways in which the next forward passes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Error,
    /// It does not even start.
    Launch,
    Panic,
    /// Logits of rows with this token are not numbers.
    NanFor(u32),
    /// One logit too few, or one token too few if there are only tokens.
    Short,
}

/// Called with each layer before it is computed.
type Hook = Box<dyn FnMut(usize) + Send>;

/// Observes a fake from outside, and breaks it.
#[derive(Clone, Default)]
pub(super) struct Controls {
    /// Those of the next passes, the next one's last.
    faults: Arc<Mutex<Vec<Option<Fault>>>>,
    /// Rows of each forward pass.
    pub(super) batches: Arc<Mutex<Vec<Vec<usize>>>>,
    /// Hook that can hold up layers.
    pub(super) before_layer: Arc<Mutex<Option<Hook>>>,
    /// Number of layers computed.
    pub(super) layers: Arc<AtomicUsize>,
    /// Iterations of the engine thread's loop.
    pub(super) loops: Arc<AtomicUsize>,
    /// Whether tokens are chosen on the device.
    pub(super) can_sample: Arc<AtomicBool>,
    /// Whether copied KV arrives only when the next layer was computed.
    pub(super) copies_slowly: Arc<AtomicBool>,
    /// Whether copied KV never arrives.
    pub(super) copies_fail: Arc<AtomicBool>,
    /// Number of tokens chosen on the device.
    pub(super) sampled: Arc<AtomicUsize>,
    /// Whether steps are queued: those of answers alone are computed when the host waits for them.
    pub(super) is_queued: Arc<AtomicBool>,
    /// Number of steps that were started on top of another one.
    pub(super) ahead: Arc<AtomicUsize>,
    /// Whether another rank of its group is lost.
    pub(super) is_apart: Arc<AtomicBool>,
    /// Whether one comes in its place that computes otherwise.
    pub(super) is_unlike: Arc<AtomicBool>,
}

impl Controls {
    pub(super) fn fail_next(&self, faults: &[Fault]) {
        let faults = faults.iter().rev().map(|fault| Some(*fault));
        self.faults.lock().unwrap().extend(faults);
    }

    /// Plans the faults of passes from the first one on.
    pub(super) fn plan_faults(&self, faults: &[Option<Fault>]) {
        *self.faults.lock().unwrap() = faults.iter().rev().copied().collect();
    }
}

pub(super) struct Fake {
    vocab: usize,
    /// Stands for the numerics: another salt gives other bits.
    salt: u64,
    layout: KvLayout,
    kv: Vec<Vec<u8>>,
    in_flight: VecDeque<Queued>,
    /// Tokens that the last step to be computed has chosen.
    chosen: Vec<u32>,
    controls: Controls,
}

/// A step in flight.
enum Queued {
    /// Its fault, rows, and choices.
    Waiting(Option<Fault>, Batch, Option<Vec<u32>>, Vec<SampleSpec>),
    Done(Output),
}

pub(super) fn layout() -> KvLayout {
    KvLayout {
        layers: LAYERS,
        kv_heads: 1,
        k_dim: 1,
        v_dim: 1,
        value_in_key: false,
        block_tokens: BLOCK_TOKENS,
        dtype: KvDType::F32,
    }
}

impl Fake {
    pub(super) fn new(vocab: usize, blocks: usize, controls: Controls) -> Self {
        let layout = layout();
        Self {
            vocab,
            salt: 0,
            layout,
            kv: vec![vec![0xEE; blocks * layout.block_layer_bytes()]; LAYERS],
            in_flight: VecDeque::new(),
            chosen: Vec::new(),
            controls,
        }
    }

    /// The same model on a device with different numerics.
    pub(super) fn salted(self, salt: u64) -> Self {
        Self { salt, ..self }
    }

    fn place(&self, blocks: &[BlockId], position: usize) -> std::ops::Range<usize> {
        let bytes = self.layout.token_layer_bytes();
        let block = blocks[position / BLOCK_TOKENS].0 as usize;
        let at = (block * BLOCK_TOKENS + position % BLOCK_TOKENS) * bytes;
        at..at + bytes
    }

    fn stored(&self, layer: usize, blocks: &[BlockId], position: usize) -> u64 {
        let bytes = &self.kv[layer][self.place(blocks, position)];
        u64::from_le_bytes(bytes.try_into().unwrap())
    }

    fn compute(
        &mut self,
        fault: Option<Fault>,
        batch: &Batch,
        choices: &[SampleSpec],
        watch: &mut dyn Watch,
    ) -> Result<Option<Output>, String> {
        let mut states: Vec<u64> = batch.tokens.iter().map(|t| u64::from(*t) + 1).collect();
        for layer in 0..LAYERS {
            if let Some(hook) = &mut *self.controls.before_layer.lock().unwrap() {
                hook(layer);
            }
            if !watch.goes_on(layer, LAYERS) {
                return Ok(None);
            }
            self.controls.layers.fetch_add(1, Ordering::Relaxed);
            for span in &batch.spans {
                for row in 0..span.rows {
                    let position = span.start + row;
                    let own = mix(states[span.first_row + row], layer as u64 ^ self.salt);
                    let place = self.place(&span.blocks, position);
                    self.kv[layer][place].copy_from_slice(&own.to_le_bytes());
                    let all = (0..=position).map(|p| self.stored(layer, &span.blocks, p));
                    states[span.first_row + row] = all.fold(7, mix);
                }
            }
            watch.layer_done(layer, &View(self));
            if layer == 0 && fault == Some(Fault::Panic) {
                panic!("the fake was told to panic");
            }
        }
        if fault == Some(Fault::Error) {
            return Err("the fake was told to fail".to_owned());
        }
        let mut logits = Vec::new();
        for row in &batch.logit_rows {
            logits.extend(logits_of(states[*row as usize], self.vocab));
            if let Some(Fault::NanFor(token)) = fault
                && batch.tokens[*row as usize] == token
            {
                let last = logits.len() - 1;
                logits[last] = f32::NAN;
            }
        }
        let others = logits.split_off(choices.len() * self.vocab);
        let rows = logits.chunks(self.vocab);
        let mut output = Output {
            chosen: rows
                .zip(choices)
                .map(|(row, spec)| chosen(row, spec))
                .collect(),
            logits: others,
        };
        // A row without a token goes on with an arbitrary one.
        let token = |chosen: &Result<u32, SampleFault>| *chosen.as_ref().unwrap_or(&0);
        self.chosen = output.chosen.iter().map(token).collect();
        let sampled = &self.controls.sampled;
        sampled.fetch_add(choices.len(), Ordering::Relaxed);
        if fault == Some(Fault::Short) && output.logits.pop().is_none() {
            output.chosen.pop();
        }
        Ok(Some(output))
    }
}

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(17) ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn logits_of(state: u64, vocab: usize) -> impl Iterator<Item = f32> {
    (0..vocab as u64).map(move |t| (mix(state, t) % 8000) as f32 / 1000.0 - 4.0)
}

/// Chooses a row's token as a device does.
fn chosen(logits: &[f32], spec: &SampleSpec) -> Result<u32, SampleFault> {
    if let Some(token) = logits.iter().position(|l| !l.is_finite()) {
        return Err(SampleFault::NotFinite {
            token: token as u32,
            value: logits[token],
        });
    }
    let params = SamplingParams {
        temperature: spec.temperature,
        top_p: spec.top_p,
        top_k: spec.top_k,
        min_p: spec.min_p,
        frequency_penalty: spec.frequency_penalty,
        presence_penalty: spec.presence_penalty,
        repetition_penalty: spec.repetition_penalty,
        seed: 0,
        logit_bias: spec.biases.clone(),
    };
    let all: Vec<u32> = spec.used.iter().map(|(token, _)| *token).collect();
    let times = |(token, times): &(u32, u32)| std::iter::repeat_n(*token, *times as usize);
    let answer: Vec<u32> = spec.used.iter().flat_map(times).collect();
    let history = History::new(&all, &answer);
    let allowed = spec.allowed.as_deref();
    choose(&params, spec.quantile, logits, &history, allowed).ok_or(SampleFault::NothingAllowed)
}

impl Forward for Fake {
    fn vocab(&self) -> usize {
        self.vocab
    }

    fn layout(&self) -> KvLayout {
        self.layout
    }

    fn can_sample(&self) -> bool {
        self.controls.can_sample.load(Ordering::Relaxed)
    }

    fn depth(&self) -> usize {
        1 + usize::from(self.controls.is_queued.load(Ordering::Relaxed))
    }

    fn start(&mut self, work: &StepWork, watch: &mut dyn Watch) -> Result<Started, String> {
        let fault = self.controls.faults.lock().unwrap().pop().flatten();
        let rows = work.batch.spans.iter().map(|s| s.rows).collect();
        self.controls.batches.lock().unwrap().push(rows);
        let ahead = &self.controls.ahead;
        ahead.fetch_add(usize::from(work.picked.is_some()), Ordering::Relaxed);
        if fault == Some(Fault::Launch) {
            return Err("the fake was told not to start".to_owned());
        }
        let (batch, choices) = (work.batch.clone(), work.choices.clone());
        if self.depth() > 1 && batch.spans.iter().all(|span| span.rows == 1) {
            let queued = Queued::Waiting(fault, batch, work.picked.clone(), choices);
            self.in_flight.push_back(queued);
            return Ok(Started::Running);
        }
        assert!(self.in_flight.is_empty(), "a prompt on top of a step");
        let Some(output) = self.compute(fault, &batch, &choices, watch)? else {
            return Ok(Started::GivenUp);
        };
        self.in_flight.push_back(Queued::Done(output));
        Ok(Started::Running)
    }

    fn group_lost(&self) -> Option<String> {
        let is_apart = self.controls.is_apart.load(Ordering::Relaxed);
        is_apart.then(|| "another rank is lost".to_owned())
    }

    fn rejoin(&mut self, _patience: Duration) -> Result<Rejoined, String> {
        std::thread::sleep(Duration::from_millis(5));
        let is_unlike = self.controls.is_unlike.load(Ordering::Relaxed);
        Ok(match self.group_lost() {
            Some(_) if is_unlike => Rejoined::Unlike("rank 1 has other numerics".to_owned()),
            Some(_) => Rejoined::Missing,
            None => Rejoined::Formed,
        })
    }

    fn wait(&mut self) -> Result<Output, String> {
        match self.in_flight.pop_front().unwrap() {
            Queued::Done(output) => Ok(output),
            Queued::Waiting(fault, mut batch, picked, choices) => {
                if let Some(picked) = picked {
                    // After a step that failed, with anything.
                    let token = |i: &u32| self.chosen.get(*i as usize).copied().unwrap_or(0);
                    batch.tokens = picked.iter().map(token).collect();
                }
                let output = self.compute(fault, &batch, &choices, &mut Unwatched)?;
                Ok(output.unwrap())
            }
        }
    }

    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String> {
        assert!(self.in_flight.is_empty(), "an import beside a step");
        for (i, token) in bytes
            .chunks_exact(self.layout.token_layer_bytes())
            .enumerate()
        {
            let place = self.place(blocks, first_token + i);
            self.kv[layer][place].copy_from_slice(token);
        }
        Ok(())
    }

    fn weights(&self) -> WeightStats {
        self.controls.loops.fetch_add(1, Ordering::Relaxed);
        WeightStats {
            read_bytes: 10,
            resident_bytes: 20,
            ..WeightStats::default()
        }
    }
}

/// Steps of answers alone are watched by nobody.
struct Unwatched;

impl Watch for Unwatched {
    fn layer_done(&mut self, _: usize, _: &dyn KvBytes) {}

    fn goes_on(&mut self, _: usize, _: usize) -> bool {
        true
    }
}

struct View<'a>(&'a Fake);

impl KvBytes for View<'_> {
    fn begin(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Box<dyn PendingKv>, String> {
        let places = (first_token..first_token + tokens).map(|p| self.0.place(blocks, p));
        Ok(Box::new(Copying {
            bytes: places
                .flat_map(|at| self.0.kv[layer][at].to_vec())
                .collect(),
            begun_at: self.0.controls.layers.load(Ordering::Relaxed),
            controls: self.0.controls.clone(),
        }))
    }
}

struct Copying {
    bytes: Vec<u8>,
    /// Layers that were computed before.
    begun_at: usize,
    controls: Controls,
}

impl PendingKv for Copying {
    fn has_arrived(&self) -> Result<bool, String> {
        let Self {
            begun_at, controls, ..
        } = self;
        let is_slow = controls.copies_slowly.load(Ordering::Relaxed);
        Ok(!is_slow || controls.layers.load(Ordering::Relaxed) > *begun_at)
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, String> {
        match self.controls.copies_fail.load(Ordering::Relaxed) {
            true => Err("the fake was told to lose it".to_owned()),
            false => Ok(self.bytes),
        }
    }
}

/// The logits after the last of `tokens`, without blocks, batches or caches;
/// `salts` are those of the devices that compute each token.
pub(super) fn salted_logits(tokens: &[u32], salts: &[u64], vocab: usize) -> Vec<f32> {
    let mut states: Vec<u64> = tokens.iter().map(|t| u64::from(*t) + 1).collect();
    for layer in 0..LAYERS {
        let own: Vec<u64> = states
            .iter()
            .zip(salts)
            .map(|(s, salt)| mix(*s, layer as u64 ^ salt))
            .collect();
        let mut sum = 7;
        for (state, own) in states.iter_mut().zip(own) {
            sum = mix(sum, own);
            *state = sum;
        }
    }
    logits_of(*states.last().unwrap(), vocab).collect()
}

/// The same if one device computes everything.
pub(super) fn oracle_logits(tokens: &[u32], vocab: usize) -> Vec<f32> {
    salted_logits(tokens, &vec![0; tokens.len()], vocab)
}

/// The answer that every engine must give.
pub(super) fn oracle(
    prompt: &[u32],
    vocab: usize,
    max_tokens: usize,
    params: &SamplingParams,
    stop: &[u32],
) -> Vec<u32> {
    mixed_oracle(prompt, 0, vocab, max_tokens, params, stop)
}

/// The answer to a prompt that was computed by a device with this salt.
pub(super) fn mixed_oracle(
    prompt: &[u32],
    prompt_salt: u64,
    vocab: usize,
    max_tokens: usize,
    params: &SamplingParams,
    stop: &[u32],
) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    let mut salts = vec![prompt_salt; prompt.len()];
    for index in 0..max_tokens {
        let answer = &tokens[prompt.len()..];
        let history = History::new(prompt, answer);
        let logits = salted_logits(&tokens, &salts, vocab);
        let next = sample(params, index, &logits, &history, None, None).unwrap();
        tokens.push(next.id);
        salts.push(0);
        if stop.contains(&next.id) {
            break;
        }
    }
    tokens[prompt.len()..].to_vec()
}
