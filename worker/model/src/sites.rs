//! The ways of keys and values between ranks: from each to each, or through one rank of each site.
//!
//! Ranks of one machine share its way to other machines. From each rank to each other, `g` ranks of a site send every piece
//! to all of the `S - g` ranks elsewhere. Passed on, a piece goes to one rank of each other site, which hands it to the others
//! there: over the way between sites it goes once, and each rank of a site takes its turn.

/// The site of each rank, by rank; none: keys and values go from each rank to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sites(Vec<u32>);

impl Sites {
    /// Each rank's keys and values go once to each other site and are passed on there.
    pub fn new(by_rank: Vec<u32>) -> Self {
        Self(by_rank)
    }

    /// The site of each rank, by rank, or none.
    pub fn by_rank(&self) -> &[u32] {
        &self.0
    }

    /// The same for a group of so many ranks: none if that is not all of them, since the ranks that are left have other numbers.
    pub(crate) fn for_ranks(self, ranks: usize) -> Self {
        match self.are_of(ranks) {
            true => self,
            false => Self::default(),
        }
    }

    /// Whether they are those of so many ranks.
    pub(crate) fn are_of(&self, ranks: usize) -> bool {
        self.0.is_empty() || self.0.len() == ranks
    }

    /// The rank that hands keys and values of the rank `of` to the rank `to`, another one.
    pub(crate) fn sender(&self, of: usize, to: usize) -> usize {
        let site = |rank: usize| self.0.get(rank).copied();
        if site(of) == site(to) {
            return of;
        }
        let at = |place| (0..self.0.len()).filter(move |rank| site(*rank) == place);
        // The ranks of a site take turns, by the place of the sender among all that are not of it.
        let turn = (0..of).filter(|rank| site(*rank) != site(to)).count();
        let here = at(site(to)).count();
        match at(site(to)).nth(turn % here.max(1)) {
            Some(gate) if gate != to => gate,
            _ => of,
        }
    }

    /// Whether the rank `at` passes keys and values of the rank `of` on to others, of `ranks` ranks.
    pub(crate) fn passes_on(&self, at: usize, of: usize, ranks: usize) -> bool {
        at != of && (0..ranks).any(|to| to != at && to != of && self.sender(of, to) == at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn others(ranks: usize, of: usize) -> impl Iterator<Item = usize> {
        (0..ranks).filter(move |to| *to != of)
    }

    #[test]
    fn each_rank_gets_each_piece_once_and_in_two_hops_at_most() {
        let all: [&[u32]; 7] = [
            &[],
            &[0, 0, 0, 0],
            &[0, 1],
            &[0, 1, 0, 1, 1],
            &[3, 3, 9],
            &[0, 0, 0, 0, 1, 1, 1, 1],
            &[0, 1, 2, 0, 1, 2, 0, 0],
        ];
        for by_rank in all {
            let sites = Sites::new(by_rank.to_vec());
            let ranks = by_rank.len().max(4);
            for of in 0..ranks {
                for to in others(ranks, of) {
                    let from = sites.sender(of, to);
                    assert_ne!(from, to);
                    if from == of {
                        continue;
                    }
                    assert_eq!(sites.sender(of, from), of, "{by_rank:?}: {of} to {from}");
                    assert_eq!(by_rank[from], by_rank[to], "{by_rank:?}: {of} to {to}");
                    assert!(sites.passes_on(from, of, ranks));
                }
            }
        }
    }

    #[test]
    fn a_piece_goes_to_each_other_site_once_and_its_ranks_take_turns() {
        let by_rank = [0, 0, 0, 0, 1, 1, 1, 1];
        let sites = Sites::new(by_rank.to_vec());
        for of in 0..8 {
            let elsewhere = others(8, of).filter(|to| by_rank[*to] != by_rank[of]);
            let direct: Vec<usize> = elsewhere.filter(|to| sites.sender(of, *to) == of).collect();
            assert_eq!(direct, [(of + 4) % 8]);
        }
    }

    #[test]
    fn ranks_of_one_site_take_turns_whatever_others_there_are() {
        for (by_rank, most) in [
            (&[0, 0, 0, 0, 1, 2, 3, 4][..], 1),
            (&[0, 0, 0, 0, 1, 1, 2, 2], 1),
            (&[0, 0, 1, 1, 1, 1, 1], 3),
        ] {
            let sites = Sites::new(by_rank.to_vec());
            let ranks = by_rank.len();
            for at in (0..ranks).filter(|at| by_rank[*at] == 0) {
                let passed_on = others(ranks, at).filter(|of| sites.passes_on(at, *of, ranks));
                let passed_on = passed_on.count();
                assert!(
                    (1..=most).contains(&passed_on),
                    "{by_rank:?}: {at} passes on {passed_on}"
                );
            }
        }
    }

    #[test]
    fn without_sites_nothing_is_passed_on() {
        let sites = Sites::default();
        assert!((0..4).all(|at| (0..4).all(|of| !sites.passes_on(at, of, 4))));
        assert!(sites.are_of(7) && !Sites::new(vec![0]).are_of(2));
        let of_four = Sites::new(vec![0, 0, 1, 1]);
        assert_eq!(of_four.clone().for_ranks(4), of_four);
        assert_eq!(of_four.for_ranks(2), sites);
    }
}
