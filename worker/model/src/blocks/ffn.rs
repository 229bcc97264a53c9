//! SwiGLU feed-forward block (arXiv:2002.05202, equation 6): `down(silu(gate x) * (up x))`.

use hearth_kernels::Backend;

use super::{Pass, layer_name, project};
use crate::flight::{indices, row_tiles};
use crate::{ModelError, ModuleWeights, TensorSpec};

/// A dense feed-forward block: a layer's own, a shared expert, or (only for its tensors) a routed expert.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwiGlu {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
}

impl SwiGlu {
    /// Lists the three matrices under `model.layers.{layer}.{prefix}`.
    pub(crate) fn tensors(&self, layer: u32, prefix: &str) -> Vec<TensorSpec> {
        let Self {
            hidden,
            intermediate,
        } = *self;
        let name = |part: &str| layer_name(layer, &format!("{prefix}.{part}.weight"));
        vec![
            TensorSpec::matrix("gate", name("gate_proj"), intermediate, hidden),
            TensorSpec::matrix("up", name("up_proj"), intermediate, hidden),
            TensorSpec::matrix("down", name("down_proj"), hidden, intermediate),
        ]
    }

    /// `x` `[rows, hidden]` → `[rows, hidden]`, in tiles of rows if there are many.
    pub(crate) fn forward<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        let (rows, hidden) = backend.shape(x);
        if rows <= pass.tile_rows {
            return self.tile(pass, weights, x);
        }
        let mut out = backend.zeros(rows, hidden)?;
        for tile in row_tiles(rows, pass.tile_rows) {
            // x, y [tile rows, hidden]
            let x = backend.rows(x, &indices(&tile))?;
            let y = self.tile(pass, weights, &x)?;
            backend.put_tile(&mut out, (tile.start, 0), &y)?;
            pass.check_cancelled()?;
        }
        Ok(out)
    }

    fn tile<B: Backend>(
        &self,
        pass: &mut Pass<'_, B>,
        weights: &ModuleWeights<B>,
        x: &B::Tensor,
    ) -> Result<B::Tensor, ModelError> {
        let backend = pass.backend;
        // gate, up [rows, intermediate]
        let [gate, up] = project(pass, weights, x, [("gate", ""), ("up", "")])?;
        pass.check_cancelled()?;
        // product [rows, intermediate]
        let product = backend.silu_mul(gate, &up)?;
        // out [rows, hidden]
        Ok(backend.linear(&product, weights.matrix("down")?, None)?)
    }
}
