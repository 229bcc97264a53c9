//! The part of a model that one rank of a group computes, and where the other layers are.

use std::ops::Range;

use hearth_kernels::{Backend, Span};

use crate::{Membership, ModelError, ModuleId, ModuleSpec};

/// Windows of a model's layers: runs of layers that one rank computes without a break (prima.cpp, section 3.1), in the
/// order of the layers, and with layers of other ranks between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    windows: Vec<Range<usize>>,
    /// Whether embedding and head belong to it, so that passes begin and end here.
    has_ends: bool,
}

impl Part {
    /// All of a model of `layers` layers.
    pub fn whole(layers: usize) -> Self {
        let window = 0..layers;
        Self {
            windows: vec![window],
            has_ends: true,
        }
    }

    /// Some windows of a model of `layers` layers; `has_ends`: with its embedding and its head. Windows without a layer between
    /// them are one.
    ///
    /// # Errors
    /// [`ModelError::Part`] if a window is empty, is not behind the one before, or ends behind the last layer; if there is
    /// none; or if the part has the embedding and not the first layer.
    pub fn new(
        windows: Vec<Range<usize>>,
        has_ends: bool,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let refused = |why: String| Err(ModelError::Part { why });
        if windows.is_empty() {
            return refused("there is no window".into());
        }
        let mut merged: Vec<Range<usize>> = Vec::with_capacity(windows.len());
        for window in windows {
            let done = merged.last().map_or(0, |last| last.end);
            let Range { start, end } = window;
            if start >= end || start < done {
                return refused(format!(
                    "layers {start}..{end} are empty, or not behind the {done} before them"
                ));
            }
            match merged.last_mut().filter(|last| last.end == start) {
                Some(last) => last.end = end,
                None => merged.push(window),
            }
        }
        let done = merged.last().map_or(0, |last| last.end);
        if done > layers {
            return refused(format!("layer {} of {layers} does not exist", done - 1));
        }
        if has_ends && merged[0].start > 0 {
            return refused("the embedding is where the first layer is".into());
        }
        Ok(Self {
            windows: merged,
            has_ends,
        })
    }

    /// Its windows, in the order of the layers.
    pub fn windows(&self) -> &[Range<usize>] {
        &self.windows
    }

    /// Whether embedding and head belong to it.
    pub fn has_ends(&self) -> bool {
        self.has_ends
    }

    /// Number of its layers.
    pub fn layers(&self) -> usize {
        self.windows.iter().map(Range::len).sum()
    }

    /// Whether a module belongs to it.
    pub fn has(&self, id: ModuleId) -> bool {
        match id.layer() {
            None => self.has_ends,
            Some(layer) => self.cache_layer(layer as usize).is_some(),
        }
    }

    /// Those of a model's modules that belong to it, in execution order.
    pub fn of(&self, mut modules: Vec<ModuleSpec>) -> Vec<ModuleSpec> {
        modules.retain(|module| self.has(module.id));
        modules
    }

    /// Index of a layer's KV in a cache of this part's layers; `None` if the layer is not one of them.
    pub fn cache_layer(&self, layer: usize) -> Option<usize> {
        let mut before = 0;
        for window in &self.windows {
            if window.contains(&layer) {
                return Some(before + layer - window.start);
            }
            before += window.len();
        }
        None
    }
}

/// Layers on other ranks, between two windows of this one.
#[derive(Clone, Debug)]
pub struct Away<'a> {
    /// Number of the pass, as [`OtherRanks::begin_pass`] gave it.
    pub pass: u64,
    /// Number of the flight among those of the pass.
    pub flight: usize,
    /// The layers.
    pub layers: Range<usize>,
    /// Sequences of the flight's rows.
    pub spans: &'a [Span],
    /// Numbers of a row.
    pub hidden: usize,
}

/// The ranks that compute the layers which a model's part does not have.
pub trait OtherRanks<B: Backend>: Membership {
    /// Begins a pass, and returns its number.
    fn begin_pass(&self) -> u64;

    /// Sends the residual stream `[rows, hidden]` of a flight to the first of these layers.
    ///
    /// # Errors
    /// [`ModelError::Group`] if a rank is lost.
    fn send(&self, away: &Away<'_>, backend: &B, stream: B::Tensor) -> Result<(), ModelError>;

    /// Waits for the residual stream `[rows, hidden]` of that flight behind the last of these layers. `check` is called now
    /// and then; its error ends the wait.
    ///
    /// # Errors
    /// [`ModelError::Group`] if a rank is lost, [`ModelError::Member`] if one failed; errors of the backend.
    fn receive(
        &self,
        away: &Away<'_>,
        backend: &B,
        check: &mut dyn FnMut() -> Result<(), ModelError>,
    ) -> Result<B::Tensor, ModelError>;

    /// Most rows of a flight: longer passes are cut, so that ranks compute at the same time.
    fn flight_rows(&self) -> usize;
}

#[cfg(test)]
#[allow(
    clippy::single_range_in_vec_init,
    reason = "a part may have one window"
)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_a_part_are_numbered_through_in_its_cache() {
        let part = Part::new(vec![2..4, 7..8], false, 10).unwrap();
        let cached = (0..10).map(|layer| part.cache_layer(layer));
        let want = [
            None,
            None,
            Some(0),
            Some(1),
            None,
            None,
            None,
            Some(2),
            None,
            None,
        ];
        assert!(cached.eq(want));
        assert_eq!(part.layers(), 3);
        assert!(part.has(ModuleId::Expert(3, 7)) && !part.has(ModuleId::Attention(4)));
        assert!(!part.has(ModuleId::Head));
    }

    #[test]
    fn parts_that_cannot_be_are_refused() {
        let refused = |windows: Vec<Range<usize>>, has_ends| {
            Part::new(windows, has_ends, 4).unwrap_err().to_string()
        };
        for (windows, has_ends, why) in [
            (vec![], false, "no window"),
            (vec![1..1], false, "layers 1..1"),
            (vec![2..3, 1..2], false, "layers 1..2"),
            (vec![3..5], false, "layer 4 of 4"),
            (vec![1..2], true, "the first layer"),
        ] {
            let error = refused(windows, has_ends);
            assert!(error.contains(why), "{error}");
        }
    }
}
