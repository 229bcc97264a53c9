//! Stop strings over streamed text: only text that may still become one is held back.

use std::sync::Arc;

/// Finds the first of some strings in text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    held: String,
}

/// Outcome of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that is certainly part of the answer.
    pub text: String,
    /// Whether a stop string was completed: the answer ends here, without it.
    pub stopped: bool,
}

impl StopMatcher {
    /// Creates a matcher of `stops`, none of which is empty.
    pub fn new(stops: impl Into<Arc<[String]>>) -> Self {
        Self {
            stops: stops.into(),
            held: String::new(),
        }
    }

    /// Takes the next piece. The string that is completed first wins; of two that end together, the longer one.
    pub fn push(&mut self, piece: &str) -> Released {
        if self.stops.is_empty() {
            return Released {
                text: piece.to_owned(),
                stopped: false,
            };
        }
        self.held.push_str(piece);
        let first = self
            .stops
            .iter()
            // The search for a string takes as long as the string, however short the text.
            .filter(|stop| stop.len() <= self.held.len())
            .filter_map(|stop| {
                self.held
                    .find(stop)
                    .map(|start| (start + stop.len(), start))
            })
            .min();
        if let Some((_, start)) = first {
            self.held.truncate(start);
            return Released {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let keep = self
            .stops
            .iter()
            .map(|stop| overlap(&self.held, stop))
            .max()
            .unwrap_or(0);
        let kept = self.held.split_off(self.held.len() - keep);
        Released {
            text: std::mem::replace(&mut self.held, kept),
            stopped: false,
        }
    }

    /// Returns the held-back text once the answer has ended: it was not a stop string after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `marker`.
pub(crate) fn overlap(text: &str, marker: &str) -> usize {
    let longest = text.len().min(marker.len().saturating_sub(1));
    (1..=longest)
        .rev()
        .find(|&length| {
            marker.is_char_boundary(length)
                && text.as_bytes().ends_with(&marker.as_bytes()[..length])
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Feeds `pieces`; returns all released text and whether it stopped.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher::new(stops);
        let mut text = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            text.push_str(&released.text);
            if released.stopped {
                return (text, true);
            }
        }
        text.push_str(&matcher.finish());
        (text, false)
    }

    #[test]
    fn a_stop_string_across_pieces_is_found_and_left_out() {
        assert_eq!(run(&["END"], &["abcE", "N", "Dxyz"]), ("abc".into(), true));
        assert_eq!(
            run(&["\n\n"], &["a\n", "b\n", "\nc"]),
            ("a\nb".into(), true)
        );
    }

    #[test]
    fn held_back_text_comes_out_when_it_was_no_stop() {
        assert_eq!(run(&["END"], &["abE", "Nx"]), ("abENx".into(), false));
        assert_eq!(run(&["END"], &["abEN"]), ("abEN".into(), false));
    }

    #[test]
    fn only_what_may_become_a_stop_is_held() {
        let mut matcher = StopMatcher::new(["aab".into()]);
        assert_eq!(matcher.push("xxaaa").text, "xxa");
        assert_eq!(matcher.push("c").text, "aac");
    }

    #[test]
    fn the_first_complete_one_wins_whatever_the_pieces() {
        assert_eq!(run(&["xabc", "ab"], &["1xabc"]), ("1x".into(), true));
        assert_eq!(
            run(&["xabc", "ab"], &["1x", "a", "b", "c"]),
            ("1x".into(), true)
        );
        assert_eq!(run(&["b", "ab"], &["1ab"]), ("1".into(), true));
    }

    #[test]
    fn characters_of_several_bytes_are_never_split() {
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".into(), false));
        assert_eq!(run(&["ééé"], &["é", "é", "x"]), ("ééx".into(), false));
    }

    proptest! {
        /// Cutting the text elsewhere changes nothing.
        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,24}", cuts in prop::collection::vec(0usize..24, 0..6),
                                stops in prop::collection::vec("[abé]{1,4}", 0..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(chars.len())).collect();
            cuts.sort_unstable();
            let mut pieces: Vec<String> = Vec::new();
            let mut last = 0;
            for cut in cuts.into_iter().chain([chars.len()]) {
                pieces.push(chars[last..cut].iter().collect());
                last = cut;
            }
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, &pieces), run(&stops, &[text.as_str()]));
        }
    }
}
