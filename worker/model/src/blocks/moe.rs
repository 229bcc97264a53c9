//! Mixture of experts: a router chooses, the chosen experts run in index order, shared experts process every token
//! (DeepSeekMoE, arXiv:2401.06066; routing of DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).

use hearth_formats::{MoeConfig, ScoreFunction};
use hearth_kernels::{Backend, ExpertCall, RouterScore, RouterSpec, Routing};

use super::ffn::SwiGlu;
use super::{Pass, layer_name};
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

    /// `x` `[rows, hidden]`, normalised → `[rows, hidden]`. `router` is dropped as soon as the experts are chosen.
    pub(crate) fn forward<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        router: Guard<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let chosen = self.route(pass, &router, x)?;
        drop(router);
        let (rows, hidden) = pass.backend.shape(x);
        // out, shared [rows, hidden]
        let mut out = pass.backend.zeros(rows, hidden)?;
        let choices = rows * self.router.top_k;
        let bank = pass.residency.expert_bank(pass.layer as u32, choices);
        let shared = match bank {
            Some(bank) => {
                pass.backend.banked_experts(&mut out, x, &chosen, &bank)?;
                self.run_shared(pass, x)?
            }
            None => {
                let routing = pass.backend.routing(chosen)?;
                self.run_chosen(pass, &mut out, x, &routing)?
            }
        };
        pass.show("experts_out", &out);
        if let Some(shared) = shared {
            pass.backend.add_assign(&mut out, &shared)?;
        }
        Ok(out)
    }

    /// Loads the chosen experts and adds their outputs to `out`, as many at once as the policy can hold. The shared
    /// expert, whose output is returned, computes while they load.
    fn run_chosen<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        out: &mut B::Tensor,
        x: &B::Tensor,
        routing: &Routing,
    ) -> Result<Option<B::Tensor>, ModelError> {
        let layer = pass.layer as u32;
        let chosen = by_expert(routing, self.experts);
        let ids: Vec<ModuleId> = chosen
            .iter()
            .map(|c| ModuleId::Expert(layer, c.expert))
            .collect();
        pass.residency.announce(&ids);
        let shared = self.run_shared(pass, x)?;
        let mut done = 0;
        while done < ids.len() {
            let count = pass
                .residency
                .group(&ids[done..])
                .clamp(1, ids.len() - done);
            let group = done..done + count;
            pass.check_cancelled()?;
            run_experts(pass, out, x, &ids[group.clone()], &chosen[group])?;
            done += count;
        }
        Ok(shared)
    }

    fn route<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        router: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Chosen, ModelError> {
        // logits [rows, experts]
        let logits = pass.backend.linear(x, router.matrix("gate")?, None)?;
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

/// Runs some of the chosen experts while holding all of their guards.
fn run_experts<B: Backend>(
    pass: &Pass<'_, B>,
    out: &mut B::Tensor,
    x: &B::Tensor,
    ids: &[ModuleId],
    chosen: &[ChosenExpert],
) -> Result<(), ModelError> {
    let guards = ids
        .iter()
        .map(|id| pass.residency.acquire(*id))
        .collect::<Result<Vec<_>, _>>()?;
    let calls = guards
        .iter()
        .zip(chosen)
        .map(|(weights, chosen)| {
            Ok(ExpertCall {
                gate: weights.matrix("gate")?,
                up: weights.matrix("up")?,
                down: weights.matrix("down")?,
                rows: &chosen.rows,
                weights: &chosen.weights,
            })
        })
        .collect::<Result<Vec<_>, ModelError>>()?;
    Ok(pass.backend.experts(out, x, &calls)?)
}

/// An expert chosen by at least one token.
#[derive(Debug, PartialEq)]
struct ChosenExpert {
    expert: u32,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// Inverts the routing, from experts by token to tokens by expert; experts and rows are in ascending order.
fn by_expert(routing: &Routing, experts: usize) -> Vec<ChosenExpert> {
    let mut all: Vec<ChosenExpert> = (0..experts as u32)
        .map(|expert| ChosenExpert {
            expert,
            rows: Vec::new(),
            weights: Vec::new(),
        })
        .collect();
    for (i, (expert, weight)) in routing.experts.iter().zip(&routing.weights).enumerate() {
        let chosen = &mut all[*expert as usize];
        chosen.rows.push((i / routing.top_k) as u32);
        chosen.weights.push(*weight);
    }
    all.retain(|chosen| !chosen.rows.is_empty());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_and_rows_ascend_and_weights_follow() {
        let routing = Routing {
            top_k: 2,
            experts: vec![1, 3, 0, 3, 1, 3],
            weights: vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
        };
        let chosen = |expert, rows: &[u32], weights: &[f32]| ChosenExpert {
            expert,
            rows: rows.into(),
            weights: weights.into(),
        };
        let want = vec![
            chosen(0, &[1], &[0.3]),
            chosen(1, &[0, 2], &[0.1, 0.5]),
            chosen(3, &[0, 1, 2], &[0.2, 0.4, 0.6]),
        ];
        assert_eq!(by_expert(&routing, 5), want);
    }
}
