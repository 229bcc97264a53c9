//! A decoder, the backend that runs it, and the policy that provides its weights.

use std::sync::Arc;
use std::time::Duration;

use hearth_formats::ModelConfig;
use hearth_kernels::trace::Trace;
use hearth_kernels::{Backend, KernelError, KvDType, KvLayout};

use crate::arch;
use crate::decoder::{Attention, Decoder};
use crate::experts::{Experts, HostExperts, LocalExperts};
use crate::peering::{Peering, Sharing};
use crate::{
    Batch, ExpertCache, Membership, ModelError, ModuleId, ModuleSpec, Observer, OtherRanks, Part,
    Peers, Residency, ResidencyStats, Sites,
};

/// Lists all modules of a model in execution order, with the names and shapes of their tensors.
///
/// # Errors
/// [`ModelError::Config`] if the configuration does not fit its architecture; one read from a file always does.
pub fn modules(config: &ModelConfig) -> Result<Vec<ModuleSpec>, ModelError> {
    arch::modules(config)
}

/// Layout of the KV that one token stores in each layer, without needing a model.
///
/// # Errors
/// Same as [`modules`].
pub fn kv_layout(
    config: &ModelConfig,
    block_tokens: usize,
    dtype: KvDType,
) -> Result<KvLayout, ModelError> {
    Ok(arch::describe(config)?.kv_layout(block_tokens, dtype))
}

/// Working memory of expanded attention: `max(least_bytes, row_bytes * rows)` for heads, and `least_bytes` more for one tile.
#[derive(Clone, Copy, Debug)]
pub struct ExpansionRoom {
    /// Bytes of any pass.
    pub least_bytes: usize,
    /// Bytes for each row of a pass, where that is more.
    pub row_bytes: usize,
}

impl ExpansionRoom {
    /// The same room for every pass.
    pub const fn of(bytes: usize) -> Self {
        Self {
            least_bytes: bytes,
            row_bytes: 0,
        }
    }
}

/// A model that computes logits.
pub struct Model<B: Backend> {
    config: ModelConfig,
    decoder: Decoder,
    backend: Arc<B>,
    residency: Arc<dyn Residency<B>>,
    experts: Box<dyn Experts<B>>,
    /// Rows that attention and dense feed-forward blocks take at once in a pass that is not long.
    tile_rows: usize,
    /// Room for expanded heads of latent attention; `None`: it is absorbed.
    expansion: Option<ExpansionRoom>,
    is_dual_batch: bool,
    part: Part,
    group: Option<InGroup<B>>,
}

/// The group of ranks that runs a model.
enum InGroup<B: Backend> {
    /// Others have the other layers; this rank is the head.
    Head(Arc<dyn OtherRanks<B>>),
    /// All have all layers, and a share of each layer's experts.
    Peer(Peering<B>),
}

impl<B: Backend> Model<B> {
    /// Calls [`modules`]; for callers that name the backend's type.
    ///
    /// # Errors
    /// Same as [`modules`].
    pub fn modules(config: &ModelConfig) -> Result<Vec<ModuleSpec>, ModelError> {
        modules(config)
    }

    /// Combines a configuration with the policy that was opened with its [`modules`].
    ///
    /// # Errors
    /// Same as [`modules`].
    pub fn new(
        config: ModelConfig,
        backend: Arc<B>,
        residency: Arc<dyn Residency<B>>,
    ) -> Result<Self, ModelError> {
        let decoder = arch::describe(&config)?;
        let part = Part::whole(config.layers);
        let experts = LocalExperts::new(Arc::clone(&backend), Arc::clone(&residency));
        Ok(Self {
            config,
            decoder,
            backend,
            residency,
            experts: Box::new(experts),
            tile_rows: usize::MAX,
            expansion: None,
            is_dual_batch: false,
            part,
            group: None,
        })
    }

    /// Computes only some of the layers, for which `residency` was opened: a follower, driven by [`Model::window`].
    #[must_use]
    pub fn of_part(mut self, part: Part) -> Self {
        self.part = part;
        self
    }

    /// Asks `others` for the layers that its part does not have.
    pub fn lead(&mut self, others: Arc<dyn OtherRanks<B>>) {
        self.group = Some(InGroup::Head(others));
    }

    /// Computes passes together with `peers`, each rank its own rows, and its experts on the model's own device; `residency`
    /// needs the modules of [`modules_of`](crate::modules_of), or all of them for a rank that computes passes alone, too. The bits
    /// are those of one rank where [`ExpertParallel::keeps_bits`](crate::ExpertParallel::keeps_bits) says so.
    pub fn share(&mut self, peers: Arc<dyn Peers>, sharing: Sharing) {
        let own = (Arc::clone(&self.backend), Arc::clone(&self.residency));
        self.group = Some(InGroup::Peer(Peering::new(peers, sharing, own)));
    }

    /// Runs attention and dense feed-forward blocks in tiles of `rows` rows, or of an eighth of a pass if that is more
    /// ([`PASS_TILES`](crate::PASS_TILES)): a long pass then needs, beside two matrices `[rows, hidden]` and those of routed
    /// experts, working memory for one tile; with peers also the queries of its rows. The bits are the same.
    #[must_use]
    pub fn in_row_tiles(mut self, rows: usize) -> Self {
        self.tile_rows = rows.max(1);
        self
    }

    /// Computes latent attention with keys and values that are expanded once a pass, for as many heads at a time as there is
    /// `room` for, instead of absorbing them into the queries: fewer operations where many rows see many
    /// positions. The cache is the same; the bits of the two forms differ, those of two sizes of room do not.
    ///
    /// # Errors
    /// [`ModelError::Config`] if the model has no latent attention.
    pub fn with_expanded_latents(mut self, room: ExpansionRoom) -> Result<Self, ModelError> {
        match self.decoder.attention {
            Attention::Mla(_) => self.expansion = Some(room),
            Attention::Gqa(_) => {
                return Err(ModelError::Config {
                    architecture: self.config.architecture.to_string(),
                    what: "expanded latents",
                });
            }
        }
        Ok(self)
    }

    /// Allocates `blocks` blocks of the model's cache, and has the backend prepare for caches of expanded heads.
    ///
    /// # Errors
    /// [`KernelError`] of the backend.
    pub fn kv_alloc(&self, layout: KvLayout, blocks: usize) -> Result<B::Kv, KernelError> {
        if let (Attention::Mla(mla), Some(_)) = (&self.decoder.attention, &self.expansion) {
            self.backend.kv_alloc(mla.expanded_layout(&layout, 1), 0)?;
        }
        self.backend.kv_alloc(layout, blocks)
    }

    /// Whether latent attention is computed with expanded keys and values.
    pub fn expands_latents(&self) -> bool {
        self.expansion.is_some()
    }

    /// Runs routed experts on another backend, the host's CPUs, in a thread of their own; `residency` has their modules
    /// there, and the model's own policy is not asked for them. `cache`: some of them are on the device too, and steps of
    /// few rows compute those there. `trace` receives what the thread does. On equal arithmetic the bits are the same.
    ///
    /// # Errors
    /// [`ModelError::Residency`] if no thread can be started.
    pub fn with_host_experts<H: Backend>(
        mut self,
        host: Arc<H>,
        residency: Arc<dyn Residency<H>>,
        cache: Option<Arc<dyn ExpertCache<B>>>,
        trace: Option<Arc<Trace>>,
    ) -> Result<Self, ModelError> {
        let device = Arc::clone(&self.backend);
        self.experts = Box::new(HostExperts::start(device, host, residency, cache, trace)?);
        Ok(self)
    }

    /// Splits steps that decode two sequences or more into two flights that take turns: one is in attention while the
    /// other one's experts run elsewhere. Without [`Model::with_host_experts`] nothing overlaps; a policy that streams
    /// weights in the order of one pass allows no second one. The bits are the same.
    #[must_use]
    pub fn in_dual_batches(mut self) -> Self {
        self.is_dual_batch = true;
        self.experts.run_beside();
        self
    }

    /// Layout of the KV cache that [`Model::forward`] reads and writes: of the layers that are computed here.
    pub fn kv_layout(&self, block_tokens: usize, dtype: KvDType) -> KvLayout {
        KvLayout {
            layers: self.part.layers(),
            ..self.decoder.kv_layout(block_tokens, dtype)
        }
    }

    /// The device.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The policy that provides the weights.
    pub fn residency(&self) -> &Arc<dyn Residency<B>> {
        &self.residency
    }

    /// Whether a pass is queued as a whole: [`Model::forward_rows`] waits neither for weights nor for what the device computes.
    pub fn queues_passes(&self) -> bool {
        self.backend.queues_operations()
            && self.group.is_none()
            && !self.residency.keeps_host_waiting()
            && !self.experts.keep_host_waiting()
    }

    /// Numerics of the backend that runs routed experts if they differ from the device's.
    pub fn expert_numerics(&self) -> Option<String> {
        let experts = match self.peering() {
            Some(peering) => &*peering.experts,
            None => &*self.experts,
        };
        experts.numerics(&self.backend.numerics())
    }

    /// Counters of all weights, on the device and elsewhere.
    pub fn stats(&self) -> ResidencyStats {
        self.residency.stats() + self.experts.stats()
    }

    /// The shape of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Runs a batch: stores its keys and values, and returns logits `[batch.logit_rows.len(), vocab]`, row-major.
    ///
    /// Besides the blocks' intermediates, the observer sees `embedding` and, for each layer, `attn_norm`, `ffn_norm`,
    /// `ffn_out` and `layer_out`, all `[rows, hidden]`; then `final_norm` `[logit rows, hidden]` and `logits`.
    ///
    /// # Errors
    /// [`ModelError::Batch`], [`ModelError::Residency`], [`ModelError::Kernel`]; [`ModelError::GivenUp`] if the
    /// observer ended it. The cache is then undefined at the positions of the batch; earlier positions are untouched.
    pub fn forward(
        &self,
        batch: &Batch,
        kv: &mut B::Kv,
        observer: &mut dyn Observer<B>,
    ) -> Result<Vec<f32>, ModelError> {
        let logits = self.forward_logits(batch, kv, observer)?;
        let logits = logits.map_or_else(|| Ok(Vec::new()), |x| self.backend.download(&x));
        logits.map_err(|e| ModelError::from(e).within(ModuleId::Head))
    }

    /// The layers that are computed here.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// The ranks that compute the other layers.
    pub(crate) fn others(&self) -> Option<&dyn OtherRanks<B>> {
        match &self.group {
            Some(InGroup::Head(others)) => Some(&**others),
            Some(InGroup::Peer(_)) | None => None,
        }
    }

    /// The ranks that compute passes together with this one.
    pub(crate) fn peering(&self) -> Option<&Peering<B>> {
        match &self.group {
            Some(InGroup::Peer(peering)) => Some(peering),
            Some(InGroup::Head(_)) | None => None,
        }
    }

    /// Whether this rank can compute passes without the group that it is in.
    pub fn computes_alone(&self) -> bool {
        self.peering().is_some_and(Peering::computes_alone)
    }

    /// Waits up to `patience` for the group to form anew, and returns whether it has.
    ///
    /// # Errors
    /// Those of [`Membership::rejoin`].
    pub fn rejoin(&self, patience: Duration) -> Result<bool, ModelError> {
        let Some(group) = self.group() else {
            return Ok(true);
        };
        let has_formed = group.rejoin(patience)?;
        if let Some(peering) = self.peering().filter(|_| has_formed) {
            peering.formed();
        }
        Ok(has_formed)
    }

    /// The group of ranks that runs the model; `None` if this rank alone does, or is a follower that sees none.
    pub fn group(&self) -> Option<&dyn Membership> {
        match self.group.as_ref()? {
            InGroup::Head(others) => Some(&**others),
            InGroup::Peer(peering) => Some(&*peering.peers),
        }
    }

    /// The blocks.
    pub(crate) fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// Rows that attention and dense feed-forward blocks take at once in a pass that is not long.
    pub(crate) fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Bytes of each row of a pass that its attention, with expanded latents, leaves free of those that a layer's routed
    /// experts take. Those are `10 * hidden` elements at least (the planner's `FLIGHT_WIDTHS`), and attention keeps the stream
    /// twice, what queries are projected from, and the heads' outputs; one more width is left for what a tile takes.
    pub fn idle_row_bytes(&self) -> usize {
        match &self.decoder.attention {
            Attention::Mla(mla) => mla.idle_row_bytes(),
            Attention::Gqa(_) => 0,
        }
    }

    /// Room for expanded heads of latent attention; `None`: it is absorbed.
    pub(crate) fn expansion(&self) -> Option<ExpansionRoom> {
        self.expansion
    }

    /// Whether decode steps run as two flights.
    pub(crate) fn is_dual_batch(&self) -> bool {
        self.is_dual_batch
    }

    /// The place where routed experts run, in a pass that is all of this rank's.
    pub(crate) fn experts(&self) -> &dyn Experts<B> {
        &*self.experts
    }

    /// How keys and values come to all ranks of a group, in passes that this one begins.
    pub(crate) fn sites(&self) -> Sites {
        let peering = self.peering();
        peering.map_or_else(Sites::default, |peering| peering.sites.clone())
    }

    /// The place where they run in a pass of which this rank has a share.
    pub(crate) fn group_experts(&self) -> Result<&dyn Experts<B>, ModelError> {
        let peering = self.peering().ok_or(ModelError::Alone)?;
        Ok(&*peering.experts)
    }
}
