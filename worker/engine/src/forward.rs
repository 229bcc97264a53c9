//! The step loop's view of a model: forward passes, and the bytes of their KV.

use std::{
    collections::VecDeque,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use hearth_kernels::ops::DeviceMemory;
use hearth_kernels::{Backend, BlockId, KernelError, KvLayout, SampleFault, SampleSpec};
use hearth_model::{
    Membership, Model, ModelError, Observer, PassSpec, Rows, SentKv, StreamedStats,
};

use crate::{
    progress::{Pass, Progress},
    work::StepWork,
};

/// Passes in flight on a device that queues them: one runs, and the next one is prepared meanwhile.
const QUEUED_PASSES: usize = 2;

/// Time between two calls of [`Watch::streamed`].
const TELL_PERIOD: Duration = Duration::from_millis(500);

/// Access to the bytes of stored KV.
pub(crate) trait KvBytes {
    /// Begins to copy `tokens * token_layer_bytes` bytes of one layer to the host, starting at a sequence's `first_token`.
    fn begin(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Box<dyn PendingKv>, String>;
}

/// Bytes on their way to the host; what is computed meanwhile does not change them.
pub(crate) trait PendingKv: Send {
    /// Whether they have arrived.
    fn has_arrived(&self) -> Result<bool, String>;
    /// Waits for them, and returns them.
    fn wait(self: Box<Self>) -> Result<Vec<u8>, String>;
}

/// Observes a forward pass while it runs.
pub(crate) trait Watch {
    /// Called when a layer's KV is final for all rows of the batch.
    fn layer_done(&mut self, layer: usize, kv: &dyn KvBytes);
    /// Whether the pass continues, after `done` of its `blocks` blocks.
    fn goes_on(&mut self, done: usize, blocks: usize) -> bool;
    /// Called now and then with what was streamed since the start, without the rows of this pass, which has not ended.
    fn streamed(&mut self, _stats: StreamedStats) {}
}

/// Weight counters.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightStats {
    pub(crate) read_bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) streamed: StreamedStats,
    /// Memory of the device; `None` for the host's.
    pub(crate) device: Option<DeviceMemory>,
}

/// Result of a forward pass for the rows whose logits are wanted.
#[derive(Default)]
pub(crate) struct Output {
    /// Tokens chosen on the device; their rows come first.
    pub(crate) chosen: Vec<Result<u32, SampleFault>>,
    /// Logits of the other rows, `[rows, vocab]`.
    pub(crate) logits: Vec<f32>,
}

/// What became of a pass at its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Started {
    /// [`Forward::wait`] will return its output.
    Running,
    /// The observer has ended it.
    GivenUp,
}

/// What became of the group's members that were asked to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rejoined {
    /// A group has formed: of all, or of those that [`Forward::group_short`] tells.
    Formed,
    /// Too few have, for now.
    Missing,
    /// One computes otherwise than before, as this says: answers would go on with other tokens.
    Unlike(String),
}

/// A model with its KV cache.
pub(crate) trait Forward: Send {
    /// Called once on the thread that makes all later calls.
    fn bind_thread(&self) -> Result<(), String> {
        Ok(())
    }
    /// Number of logits per token.
    fn vocab(&self) -> usize;
    /// Layout of the KV cache.
    fn layout(&self) -> KvLayout;
    /// Whether [`Forward::start`] accepts choices of tokens.
    fn can_sample(&self) -> bool;
    /// Passes that may be in flight at once: more than 1 where the device queues them and feeds the tokens that it chooses to
    /// the next one.
    fn depth(&self) -> usize;
    /// Starts a pass behind those in flight. Tokens are chosen from the logits of the first `work.choices.len()` of the
    /// batch's `logit_rows`; the others come to the host.
    fn start(&mut self, work: &StepWork, watch: &mut dyn Watch) -> Result<Started, String>;
    /// Waits for the first of the passes in flight, which is over afterwards, whatever its outcome.
    fn wait(&mut self) -> Result<Output, String>;
    /// Stores KV from another worker's cache.
    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String>;
    /// Why the device is lost; `None` while it answers.
    fn device_lost(&self) -> Option<String> {
        None
    }
    /// Why the group of ranks that run the model is not complete: no pass succeeds, and none of the KV is left, but for a rank
    /// that computes alone, too.
    fn group_lost(&self) -> Option<String> {
        None
    }
    /// Set where passes succeed with fewer ranks than are planned: how many are together, and who is missing and why.
    fn group_short(&self) -> Option<String> {
        None
    }
    /// What this rank has sent other ranks of the group of keys and values.
    fn sent_kv(&self) -> SentKv {
        SentKv::default()
    }
    /// Whether passes succeed without the group, and all KV is here.
    fn computes_alone(&self) -> bool {
        false
    }
    /// Whether other ranks compute a part of the model.
    fn is_in_group(&self) -> bool {
        false
    }
    /// Waits up to `patience` for the group to be complete.
    fn rejoin(&mut self, _patience: Duration) -> Result<Rejoined, String> {
        Ok(Rejoined::Formed)
    }
    /// Returns counters since the start.
    fn weights(&self) -> WeightStats;
    /// Progress of the running pass.
    fn progress(&self) -> Progress {
        Progress::default()
    }
}

/// A real model.
pub(crate) struct ModelForward<B: Backend> {
    model: Model<B>,
    backend: Arc<B>,
    kv: B::Kv,
    progress: Progress,
    in_flight: VecDeque<Results<B>>,
    lost: Lost,
}

/// Why the device is lost, once it is; clones share it.
#[derive(Clone, Default)]
struct Lost(Arc<OnceLock<String>>);

impl Lost {
    /// The text of an error, remembered if it means that the device is lost.
    fn noted(&self, error: &ModelError) -> String {
        let text = error.to_string();
        if error.is_device_lost() {
            // The first error tells best.
            let _ = self.0.set(text.clone());
        }
        text
    }
}

/// Results of a pass in flight.
struct Results<B: Backend> {
    chosen: Option<B::Tokens>,
    logits: Option<B::Tensor>,
}

impl<B: Backend> ModelForward<B> {
    pub(crate) fn new(model: Model<B>, kv: B::Kv) -> Self {
        Self {
            backend: model.backend().clone(),
            model,
            kv,
            progress: Progress::default(),
            in_flight: VecDeque::new(),
            lost: Lost::default(),
        }
    }

    /// Begins to choose tokens where the logits are, and keeps the other rows for the host.
    fn results(
        &self,
        logits: Option<B::Tensor>,
        choices: &[SampleSpec],
    ) -> Result<Results<B>, KernelError> {
        let backend = &*self.backend;
        let Some(all) = logits.as_ref().filter(|_| !choices.is_empty()) else {
            return Ok(Results {
                chosen: None,
                logits,
            });
        };
        let others: Vec<u32> = (choices.len()..backend.shape(all).0)
            .map(|row| row as u32)
            .collect();
        let rest = (!others.is_empty()).then(|| backend.rows(all, &others));
        Ok(Results {
            logits: rest.transpose()?,
            chosen: Some(backend.sample(all, choices)?),
        })
    }

    fn output(&self, results: &Results<B>) -> Result<Output, KernelError> {
        let chosen = results.chosen.as_ref();
        let logits = results.logits.as_ref();
        Ok(Output {
            chosen: chosen.map_or_else(|| Ok(Vec::new()), |tokens| self.backend.landed(tokens))?,
            logits: logits.map_or_else(|| Ok(Vec::new()), |rows| self.backend.download(rows))?,
        })
    }
}

impl<B: Backend> Forward for ModelForward<B> {
    fn bind_thread(&self) -> Result<(), String> {
        self.backend.bind_thread().map_err(|e| e.to_string())
    }

    fn vocab(&self) -> usize {
        self.model.config().vocab_size
    }

    fn layout(&self) -> KvLayout {
        self.backend.kv_layout(&self.kv)
    }

    fn can_sample(&self) -> bool {
        self.backend.can_sample(self.vocab())
    }

    fn depth(&self) -> usize {
        match self.can_sample() && self.model.queues_passes() {
            true => QUEUED_PASSES,
            false => 1,
        }
    }

    fn start(&mut self, work: &StepWork, watch: &mut dyn Watch) -> Result<Started, String> {
        let backend = Arc::clone(&self.backend);
        let batch = &work.batch;
        let (model, pass_rows) = (&self.model, batch.tokens.len() as u64);
        let streamed = || {
            let mut streamed = model.stats().streamed;
            streamed.passes = streamed.passes.saturating_sub(1);
            streamed.rows = streamed.rows.saturating_sub(pass_rows);
            streamed
        };
        let mut observing = Observing {
            backend: &backend,
            lost: &self.lost,
            watch,
            pass: self.progress.begin(),
            streamed: &streamed,
            told_at: Instant::now(),
        };
        let rows = match &work.picked {
            None => Rows::Tokens(&batch.tokens),
            Some(picked) => {
                let before = self.in_flight.back().and_then(|r| r.chosen.as_ref());
                let tokens = before.ok_or("the step before it chooses no tokens on the device")?;
                Rows::Sampled { tokens, picked }
            }
        };
        let pass = PassSpec {
            spans: &batch.spans,
            logit_rows: &batch.logit_rows,
            alone: work.alone,
        };
        let logits = self
            .model
            .forward_rows(rows, pass, &mut self.kv, &mut observing);
        let logits = match logits {
            Err(ModelError::GivenUp) => return Ok(Started::GivenUp),
            Err(error) => return Err(self.lost.noted(&error)),
            Ok(logits) => logits,
        };
        let results = self.results(logits, &work.choices);
        let results = results.map_err(|error| self.lost.noted(&error.into()))?;
        self.in_flight.push_back(results);
        Ok(Started::Running)
    }

    fn wait(&mut self) -> Result<Output, String> {
        let results = self.in_flight.pop_front().ok_or("no step is in flight")?;
        // A device that hangs is seen here.
        let _pass = self.progress.begin();
        self.output(&results)
            .map_err(|error| self.lost.noted(&error.into()))
    }

    fn write(
        &mut self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        bytes: &[u8],
    ) -> Result<(), String> {
        let backend = Arc::clone(&self.backend);
        backend
            .kv_write(&mut self.kv, layer, blocks, first_token, bytes)
            .map_err(|error| self.lost.noted(&error.into()))
    }

    fn device_lost(&self) -> Option<String> {
        self.lost.0.get().cloned()
    }

    fn group_lost(&self) -> Option<String> {
        self.model.group().and_then(Membership::lost)
    }

    fn group_short(&self) -> Option<String> {
        self.model.group().and_then(Membership::short)
    }

    fn sent_kv(&self) -> SentKv {
        self.model
            .group()
            .map_or_else(SentKv::default, Membership::sent_kv)
    }

    fn is_in_group(&self) -> bool {
        self.model.group().is_some()
    }

    fn computes_alone(&self) -> bool {
        self.model.computes_alone()
    }

    fn rejoin(&mut self, patience: Duration) -> Result<Rejoined, String> {
        match self.model.rejoin(patience) {
            Ok(true) => Ok(Rejoined::Formed),
            Ok(false) => Ok(Rejoined::Missing),
            Err(ModelError::Unlike { why }) => Ok(Rejoined::Unlike(why)),
            Err(error) => Err(error.to_string()),
        }
    }

    fn progress(&self) -> Progress {
        self.progress.clone()
    }

    fn weights(&self) -> WeightStats {
        let stats = self.model.stats();
        WeightStats {
            read_bytes: stats.read_bytes,
            resident_bytes: stats.resident_bytes,
            streamed: stats.streamed,
            device: self.backend.device_memory(),
        }
    }
}

/// Forwards a model's own observation, with the cache made readable.
struct Observing<'a, B: Backend> {
    backend: &'a Arc<B>,
    lost: &'a Lost,
    watch: &'a mut dyn Watch,
    pass: Pass,
    streamed: &'a dyn Fn() -> StreamedStats,
    told_at: Instant,
}

impl<B: Backend> Observer<B> for Observing<'_, B> {
    fn layer_done(&mut self, layer: usize, kv: &B::Kv) {
        self.pass.goes_on();
        let view = View {
            backend: self.backend,
            lost: self.lost,
            kv,
        };
        self.watch.layer_done(layer, &view);
    }

    fn goes_on(&mut self, done: usize, blocks: usize) -> bool {
        // Layers on other ranks may take their time; these look after themselves.
        self.pass.goes_on();
        if self.told_at.elapsed() >= TELL_PERIOD {
            self.told_at = Instant::now();
            self.watch.streamed((self.streamed)());
        }
        self.watch.goes_on(done, blocks)
    }

    fn sees_tensors(&self) -> bool {
        false
    }
}

struct View<'a, B: Backend> {
    backend: &'a Arc<B>,
    lost: &'a Lost,
    kv: &'a B::Kv,
}

impl<B: Backend> KvBytes for View<'_, B> {
    fn begin(
        &self,
        layer: usize,
        blocks: &[BlockId],
        first_token: usize,
        tokens: usize,
    ) -> Result<Box<dyn PendingKv>, String> {
        let copy = self
            .backend
            .kv_read_begin(self.kv, layer, blocks, first_token, tokens);
        Ok(Box::new(Copying {
            backend: Arc::clone(self.backend),
            lost: self.lost.clone(),
            copy: copy.map_err(|error| self.lost.noted(&error.into()))?,
        }))
    }
}

struct Copying<B: Backend> {
    backend: Arc<B>,
    lost: Lost,
    copy: B::HostCopy,
}

impl<B: Backend> PendingKv for Copying<B> {
    fn has_arrived(&self) -> Result<bool, String> {
        self.backend
            .host_copy_is_done(&self.copy)
            .map_err(|error| self.lost.noted(&error.into()))
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, String> {
        let Self {
            backend,
            lost,
            copy,
        } = *self;
        let bytes = backend
            .host_copy_wait(&copy)
            .and_then(|()| backend.host_copy_end(copy));
        bytes.map_err(|error| lost.noted(&error.into()))
    }
}
