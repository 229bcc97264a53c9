//! Order of the experts' sum.

use crate::expert_sum::{LEAVES, leaf_of};

/// Sum of one element of the experts' weighted outputs, by the tree of [`expert_sum`](crate::expert_sum). `outputs`: index
/// of an expert of `experts`, its weight and its output; experts ascend.
pub fn expert_sum(outputs: &[(usize, f32, f32)], experts: usize) -> f32 {
    let mut leaves = [0f32; LEAVES];
    for &(expert, weight, output) in outputs {
        leaves[leaf_of(expert, experts)] += weight * output;
    }
    let [a, b, c, d, e, f, g, h] = leaves;
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}
