//! Mixture of experts: a router chooses, the chosen experts run where the model has them, shared experts process every token
//! (DeepSeekMoE, arXiv:2401.06066; routing of DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).

use hearth_formats::{MoeConfig, ScoreFunction};
use hearth_kernels::{Backend, RouterScore, RouterSpec};

use super::ffn::SwiGlu;
use super::{Pass, layer_name};
use crate::experts::{Experts, RoutedLayer};
use crate::flight::MoeInFlight;
use crate::{Guard, ModelError, ModuleId, ModuleSpec, ModuleWeights, TensorSpec};

/// Intermediates, by name: `router_logits` `[rows, experts]`, `shared_out` `[rows, hidden]` (if there are shared
/// experts), `experts_out` `[rows, hidden]`.
#[derive(Clone, Debug)]
pub(crate) struct Moe {
    experts: usize,
    expert: SwiGlu,
    shared: Option<SwiGlu>,
    correction_bias: bool,
    router: RouterSpec,
}

impl Moe {
    pub(crate) fn new(hidden: usize, moe: &MoeConfig) -> Self {
        let width = moe.intermediate_size;
        Self {
            experts: moe.experts,
            expert: SwiGlu {
                hidden,
                intermediate: width,
            },
            shared: (moe.shared_experts > 0).then(|| SwiGlu {
                hidden,
                intermediate: width * moe.shared_experts,
            }),
            correction_bias: moe.correction_bias,
            router: RouterSpec {
                score: match moe.score {
                    ScoreFunction::Softmax => RouterScore::Softmax,
                    ScoreFunction::Sigmoid => RouterScore::Sigmoid,
                },
                top_k: moe.experts_per_token,
                groups: moe.groups,
                top_groups: moe.top_groups,
                normalize: moe.normalize,
                scaling: moe.scaling,
            },
        }
    }

    /// Router, shared expert and routed experts, in execution order; the layer's norm belongs to the router.
    pub(crate) fn modules(&self, layer: u32, norm: TensorSpec) -> Vec<ModuleSpec> {
        let gate = |part: &str| layer_name(layer, &format!("mlp.gate.{part}"));
        let hidden = self.expert.hidden;
        let mut tensors = vec![
            norm,
            TensorSpec::matrix("gate", gate("weight"), self.experts, hidden),
        ];
        if self.correction_bias {
            let name = gate("e_score_correction_bias");
            tensors.push(TensorSpec::vector("correction_bias", name, self.experts));
        }
        let mut modules = vec![ModuleSpec {
            id: ModuleId::Router(layer),
            tensors,
        }];
        modules.extend(self.shared.map(|shared| ModuleSpec {
            id: ModuleId::SharedExpert(layer),
            tensors: shared.tensors(layer, "mlp.shared_experts"),
        }));
        modules.extend((0..self.experts as u32).map(|expert| ModuleSpec {
            id: ModuleId::Expert(layer, expert),
            tensors: self.expert.tensors(layer, &format!("mlp.experts.{expert}")),
        }));
        modules
    }

    /// Chooses experts for `x` `[rows, hidden]`, normalised, begins them, and runs the shared ones. `router` is dropped as
    /// soon as the experts are chosen.
    pub(crate) fn begin<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        experts: &dyn Experts<B>,
        router: Guard<B>,
        x: B::Tensor,
    ) -> Result<MoeInFlight<B>, ModelError> {
        let chosen = self.route(pass, &router, &x)?;
        drop(router);
        let layer = self.routed(pass.layer);
        let routed = experts.begin(layer, &x, chosen, pass.sequences.group())?;
        let shared = self.run_shared(pass, &x)?;
        Ok(MoeInFlight { x, shared, routed })
    }

    /// What the place where its experts run is told of it.
    pub(crate) fn routed(&self, layer: usize) -> RoutedLayer {
        RoutedLayer {
            layer: layer as u32,
            experts: self.experts,
            top_k: self.router.top_k,
        }
    }

    /// Whether it has shared experts.
    pub(crate) fn has_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Adds the outputs of the experts that were begun to those of the shared ones → `[rows, hidden]`.
    pub(crate) fn end<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        begun: MoeInFlight<B>,
    ) -> Result<B::Tensor, ModelError> {
        let MoeInFlight { x, shared, routed } = begun;
        // out [rows, hidden]
        let out = routed.finish(&x, &mut || pass.check_cancelled())?;
        pass.show("experts_out", &out);
        Ok(match shared {
            Some(shared) => pass.backend.sum(out, shared)?,
            None => out,
        })
    }

    fn route<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        router: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Chosen, ModelError> {
        // logits [rows, experts]
        let logits = pass.backend.router_linear(x, router.matrix("gate")?)?;
        pass.show("router_logits", &logits);
        let bias = router.optional_vector("correction_bias");
        Ok(pass.backend.route(&logits, bias, self.router)?)
    }

    fn run_shared<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        x: &B::Tensor,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let Some(shared) = &self.shared else {
            return Ok(None);
        };
        let id = ModuleId::SharedExpert(pass.layer as u32);
        let weights = pass.residency.acquire(id)?;
        // out [rows, hidden]
        let out = shared
            .forward(pass, &weights, x)
            .map_err(|e| e.within(id))?;
        pass.show("shared_out", &out);
        Ok(Some(out))
    }
}
