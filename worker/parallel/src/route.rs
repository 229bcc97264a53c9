//! The way of a pass through the ranks of a ring.

use std::ops::Range;

use hearth_model::{ModelError, Part};

/// A run of layers that one rank computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leg {
    /// The rank.
    pub rank: usize,
    /// Its layers.
    pub layers: Range<usize>,
}

/// Which rank computes which layers: a ring of ranks, `k` times around it for a token (prima.cpp, section 3.1). The first legs
/// are the head's; behind the last layer a pass returns to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    legs: Vec<Leg>,
}

impl Route {
    /// A route through `layers` layers. Legs of the same rank that follow each other become one, and those without layers
    /// are left out.
    ///
    /// # Errors
    /// [`ModelError::Part`] if the legs do not cover the layers in order, or the first one is not the head's.
    pub fn new(legs: Vec<Leg>, layers: usize) -> Result<Self, ModelError> {
        let refused = |why: String| Err(ModelError::Part { why });
        let mut merged: Vec<Leg> = Vec::with_capacity(legs.len());
        let mut done = 0;
        for leg in legs {
            if leg.layers.start != done || leg.layers.end < done {
                let Range { start, end } = leg.layers;
                return refused(format!(
                    "rank {} has layers {start}..{end}, where layer {done} comes next",
                    leg.rank
                ));
            }
            done = leg.layers.end;
            match merged.last_mut() {
                _ if leg.layers.is_empty() => {}
                Some(last) if last.rank == leg.rank => last.layers.end = done,
                _ => merged.push(leg),
            }
        }
        if done != layers {
            return refused(format!("{done} of {layers} layers have a rank"));
        }
        match merged.first() {
            Some(first) if first.rank == 0 => Ok(Self { legs: merged }),
            _ => refused("the first layers are the head's".into()),
        }
    }

    /// A route around a ring: `windows[rank]` is the number of layers that a rank computes a round, until all are computed.
    ///
    /// # Errors
    /// Same as [`Route::new`]; [`ModelError::Part`] if no rank has a layer.
    pub fn around(windows: &[usize], layers: usize) -> Result<Self, ModelError> {
        if windows.iter().sum::<usize>() == 0 {
            let why = "no rank has a layer".into();
            return Err(ModelError::Part { why });
        }
        let mut legs = Vec::new();
        let mut done = 0;
        while done < layers {
            for (rank, window) in windows.iter().enumerate() {
                let end = layers.min(done + window);
                legs.push(Leg {
                    rank,
                    layers: done..end,
                });
                done = end;
            }
        }
        Self::new(legs, layers)
    }

    /// The legs, in order.
    pub fn legs(&self) -> &[Leg] {
        &self.legs
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.legs.last().map_or(0, |last| last.layers.end)
    }

    /// Number of ranks, those without layers among them.
    pub fn ranks(&self) -> usize {
        self.legs.iter().map(|leg| leg.rank + 1).max().unwrap_or(0)
    }

    /// What a rank computes.
    ///
    /// # Errors
    /// [`ModelError::Part`] if it has no layer.
    pub fn part(&self, rank: usize) -> Result<Part, ModelError> {
        let legs = self.legs.iter().filter(|leg| leg.rank == rank);
        let windows = legs.map(|leg| leg.layers.clone()).collect();
        Part::new(windows, rank == 0, self.layers())
    }

    /// The leg that begins with a layer.
    pub fn from(&self, layer: usize) -> Option<&Leg> {
        self.legs.iter().find(|leg| leg.layers.start == layer)
    }

    /// The rank that a pass goes to in front of a layer: the one that computes it, or the head behind the last one.
    pub fn to(&self, layer: usize) -> Option<usize> {
        match layer == self.layers() {
            true => Some(0),
            false => self.from(layer).map(|leg| leg.rank),
        }
    }

    /// The rank that a pass comes from in front of a layer that is not the first.
    pub fn behind(&self, layer: usize) -> Option<usize> {
        let leg = self.legs.iter().find(|leg| leg.layers.end == layer);
        leg.map(|leg| leg.rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn legs(route: &Route) -> Vec<(usize, Range<usize>)> {
        let legs = route.legs().iter();
        legs.map(|leg| (leg.rank, leg.layers.clone())).collect()
    }

    #[test]
    fn a_route_goes_around_until_all_layers_are_computed() {
        let route = Route::around(&[2, 1, 1], 10).unwrap();
        let want = [
            (0, 0..2),
            (1, 2..3),
            (2, 3..4),
            (0, 4..6),
            (1, 6..7),
            (2, 7..8),
            (0, 8..10),
        ];
        assert_eq!(legs(&route), want);
        assert_eq!(route.part(0).unwrap().windows(), [0..2, 4..6, 8..10]);
        assert_eq!(route.part(2).unwrap().windows(), [3..4, 7..8]);
        assert_eq!((route.to(3), route.behind(3)), (Some(2), Some(1)));
        assert_eq!((route.to(10), route.behind(10)), (Some(0), Some(0)));
        // 61 layers have no divisors: the last round is a partial one.
        let deepseek = Route::around(&[7, 5, 4], 61).unwrap();
        assert_eq!(deepseek.layers(), 61);
        assert_eq!(legs(&deepseek).last().unwrap(), &(2, 60..61));
    }

    #[test]
    fn ranks_without_layers_are_passed_by() {
        let route = Route::around(&[2, 0, 2], 4).unwrap();
        assert_eq!(legs(&route), [(0, 0..2), (2, 2..4)]);
        assert!(route.part(1).unwrap_err().to_string().contains("no window"));
        assert_eq!(legs(&Route::around(&[1, 0], 3).unwrap()), [(0, 0..3)]);
    }

    #[test]
    fn routes_with_holes_are_refused() {
        let leg = |rank, layers| Leg { rank, layers };
        for (legs, why) in [
            (vec![leg(0, 0..2), leg(1, 3..4)], "layer 2 comes next"),
            (vec![leg(0, 0..2)], "2 of 4 layers"),
            (vec![leg(1, 0..4)], "the head's"),
            (vec![], "0 of 4 layers"),
        ] {
            let error = Route::new(legs, 4).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        assert!(Route::around(&[0, 0], 4).is_err());
    }
}
