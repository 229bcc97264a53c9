//! Certificate actions that are due at a given time: pure.
//!
//! An authority is valid for ten years. After two thirds of that time it creates its successor, which is distributed
//! as trusted long before it signs anything; it is dropped once none of its certificates can be valid any more. So two
//! processes that meet always trust each other, whichever of them has read its files first.

use std::time::Duration;

use jiff::Timestamp;

use super::issue::{Facts, SKEW, Usage};

/// Validity period of an authority.
pub(super) const AUTHORITY_LIFETIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Minimum time for which an authority has been trusted everywhere before it signs.
const OVERLAP: Duration = Duration::from_secs(24 * 3600);

/// Action due for the authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthorityDue {
    /// Nothing until that time.
    Nothing(Timestamp),
    /// Create a successor and distribute it as trusted.
    Announce,
    /// Let the successor sign from now on.
    Promote,
    /// Stop trusting the predecessor.
    DropOld,
    /// It has expired without a successor: start over with a new one.
    Replace,
}

/// Times of an authority, its successor and its predecessor.
#[derive(Clone, Copy, Debug)]
pub(super) struct AuthorityTimes<'a> {
    pub(super) signing: &'a Facts,
    pub(super) next: Option<&'a Facts>,
    /// Time at which the signing authority took over from a predecessor that is still trusted.
    pub(super) promoted: Option<Timestamp>,
}

/// Returns the action due at `now`, given leaves that are valid for `leaf_lifetime`.
pub(super) fn authority_due(
    times: AuthorityTimes<'_>,
    leaf_lifetime: Duration,
    now: Timestamp,
) -> AuthorityDue {
    let AuthorityTimes {
        signing,
        next,
        promoted,
    } = times;
    if now >= signing.not_after {
        return match next {
            Some(next) if now < next.not_after => AuthorityDue::Promote,
            _ => AuthorityDue::Replace,
        };
    }
    let announce = after(signing.not_before, SKEW + part(lifetime_of(signing), 2, 3));
    let mut again = announce;
    match next {
        Some(next) => {
            let promote = after(next.not_before, SKEW + OVERLAP);
            if now >= promote {
                return AuthorityDue::Promote;
            }
            again = promote;
        }
        None if now >= announce => return AuthorityDue::Announce,
        None => {}
    }
    if let Some(promoted) = promoted {
        let drop = after(promoted, leaf_lifetime + OVERLAP);
        if now >= drop {
            return AuthorityDue::DropOld;
        }
        again = again.min(drop);
    }
    AuthorityDue::Nothing(again)
}

/// Action due for a Secret with certificates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeafAction {
    /// Nothing until that time.
    Nothing(Timestamp),
    /// Rewrite only the bundle of trusted authorities.
    Trust,
    /// Issue a new certificate, and write the bundle.
    Issue,
}

/// Current contents of a Secret with certificates.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) facts: Facts,
    /// `ca.crt`.
    pub(super) bundle: String,
    /// Time since which the bundle is unchanged.
    pub(super) bundle_since: Option<Timestamp>,
}

/// Desired contents of a Secret with certificates.
#[derive(Clone, Copy, Debug)]
pub(super) struct LeafWanted<'a> {
    /// DNS name in the certificate.
    pub(super) name: &'a str,
    pub(super) usage: Usage,
    /// The authority that signs.
    pub(super) signing: &'a Facts,
    /// Subjects of the trusted authorities.
    pub(super) trusted: &'a [String],
    /// `ca.crt`.
    pub(super) bundle: &'a str,
    pub(super) lifetime: Duration,
}

/// Returns the action due at `now`; `leaf` is `None` if there is no Secret, or nothing usable in it.
pub(super) fn leaf_due(leaf: Option<&Leaf>, wanted: LeafWanted<'_>, now: Timestamp) -> LeafAction {
    let Some(leaf) = leaf else {
        return LeafAction::Issue;
    };
    let facts = &leaf.facts;
    let is_trusted = wanted.trusted.contains(&facts.issuer);
    let is_as_wanted = facts.names == [wanted.name] && facts.usage == wanted.usage;
    if now >= facts.not_after || !is_as_wanted || !is_trusted {
        return LeafAction::Issue;
    }
    if leaf.bundle != wanted.bundle {
        return LeafAction::Trust;
    }
    let lifetime = lifetime_of(facts).min(wanted.lifetime);
    let mut issue = after(facts.not_before, SKEW + part(lifetime, 2, 3));
    if facts.issuer != wanted.signing.subject {
        let settled = leaf.bundle_since.unwrap_or(Timestamp::UNIX_EPOCH);
        issue = issue.min(after(settled, settling(wanted.lifetime)));
    }
    if now >= issue {
        LeafAction::Issue
    } else {
        LeafAction::Nothing(issue)
    }
}

/// Time that processes get to read a new bundle before one of them presents a certificate that requires it.
fn settling(lifetime: Duration) -> Duration {
    part(lifetime, 1, 12).min(Duration::from_secs(3600))
}

/// Intended validity period, excluding the skew.
fn lifetime_of(facts: &Facts) -> Duration {
    let span = facts.not_after.duration_since(facts.not_before);
    Duration::try_from(span)
        .unwrap_or_default()
        .saturating_sub(SKEW)
}

fn part(duration: Duration, numerator: u32, denominator: u32) -> Duration {
    duration * numerator / denominator
}

/// The time `duration` after `at`; the end of time if that overflows.
fn after(at: Timestamp, duration: Duration) -> Timestamp {
    at.checked_add(duration).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const DAY: Duration = Duration::from_secs(24 * 3600);
    const LEAF: Duration = Duration::from_secs(90 * 24 * 3600);

    fn start() -> Timestamp {
        "2026-11-20T12:00:00Z".parse().expect("time")
    }

    fn at(duration: Duration) -> Timestamp {
        after(start(), duration)
    }

    fn facts(subject: &str, issuer: &str, made: Timestamp, lifetime: Duration) -> Facts {
        Facts {
            serial: "01".to_owned(),
            subject: subject.to_owned(),
            issuer: issuer.to_owned(),
            names: vec!["demo.default.hearth".to_owned()],
            usage: Usage::Both,
            not_before: made.checked_sub(SKEW).expect("time"),
            not_after: after(made, lifetime),
        }
    }

    /// An authority's whole life, in steps of the returned times: each action with the days since the start.
    #[test]
    fn an_authority_hands_over_without_a_gap() {
        let mut signing = facts("A", "A", start(), AUTHORITY_LIFETIME);
        let (mut next, mut promoted) = (None::<Facts>, None);
        let mut steps = Vec::new();
        let mut now = start();
        while steps.len() < 6 {
            let times = AuthorityTimes {
                signing: &signing,
                next: next.as_ref(),
                promoted,
            };
            let due = authority_due(times, LEAF, now);
            let day = Duration::try_from(now.duration_since(start()))
                .expect("later")
                .as_secs()
                / 86_400;
            match due {
                AuthorityDue::Nothing(again) => {
                    assert!(again > now, "{again} is not after {now}");
                    now = again;
                    continue;
                }
                AuthorityDue::Announce => {
                    let name = format!("{}+", signing.subject);
                    next = Some(facts(&name, &name, now, AUTHORITY_LIFETIME));
                }
                AuthorityDue::Promote => {
                    signing = next.take().expect("a successor");
                    promoted = Some(now);
                }
                AuthorityDue::DropOld => promoted = None,
                AuthorityDue::Replace => panic!("expired at {now}"),
            }
            steps.push((due, day));
        }
        let two_thirds = 3650 * 2 / 3;
        assert_eq!(
            steps[..3],
            [
                (AuthorityDue::Announce, two_thirds),
                (AuthorityDue::Promote, two_thirds + 1),
                (AuthorityDue::DropOld, two_thirds + 1 + 91),
            ]
        );
        assert_eq!(steps[3].0, AuthorityDue::Announce);
    }

    #[test]
    fn an_expired_authority_is_replaced_by_its_successor_or_anew() {
        let signing = facts("A", "A", start(), AUTHORITY_LIFETIME);
        let next = facts("B", "B", at(AUTHORITY_LIFETIME), AUTHORITY_LIFETIME);
        let now = at(AUTHORITY_LIFETIME);
        let due = |next| {
            authority_due(
                AuthorityTimes {
                    signing: &signing,
                    next,
                    promoted: None,
                },
                LEAF,
                now,
            )
        };
        assert_eq!(due(Some(&next)), AuthorityDue::Promote);
        assert_eq!(due(None), AuthorityDue::Replace);
    }

    fn leaf(issuer: &str, bundle: &str, since: Option<Timestamp>) -> Option<Leaf> {
        Some(Leaf {
            facts: facts("leaf", issuer, start(), LEAF),
            bundle: bundle.to_owned(),
            bundle_since: since,
        })
    }

    #[test]
    fn leaves_are_renewed_early_and_follow_their_authority_once_it_is_trusted() {
        let signing = facts("B", "B", start(), AUTHORITY_LIFETIME);
        let wanted = LeafWanted {
            name: "demo.default.hearth",
            usage: Usage::Both,
            signing: &signing,
            trusted: &["A".to_owned(), "B".to_owned()],
            bundle: "AB",
            lifetime: LEAF,
        };
        let mut renamed = leaf("B", "AB", None);
        if let Some(leaf) = &mut renamed {
            leaf.facts.names = vec!["other.default.hearth".to_owned()];
        }
        let (hour, two, renewal) = (at(HOUR), at(2 * HOUR), at(60 * DAY));
        let cases = [
            ("no Secret", None, start(), LeafAction::Issue),
            (
                "fresh",
                leaf("B", "AB", None),
                hour,
                LeafAction::Nothing(renewal),
            ),
            (
                "two thirds",
                leaf("B", "AB", None),
                renewal,
                LeafAction::Issue,
            ),
            ("expired", leaf("B", "A", None), at(LEAF), LeafAction::Issue),
            ("another name", renamed, hour, LeafAction::Issue),
            ("new bundle", leaf("A", "A", None), hour, LeafAction::Trust),
            (
                "bundle of now",
                leaf("A", "AB", Some(hour)),
                hour,
                LeafAction::Nothing(two),
            ),
            (
                "settled bundle",
                leaf("A", "AB", Some(hour)),
                two,
                LeafAction::Issue,
            ),
            (
                "bundle of any age",
                leaf("A", "AB", None),
                hour,
                LeafAction::Issue,
            ),
            (
                "a stranger's",
                leaf("C", "AB", Some(hour)),
                hour,
                LeafAction::Issue,
            ),
        ];
        for (what, leaf, now, due) in cases {
            assert_eq!(leaf_due(leaf.as_ref(), wanted, now), due, "{what}");
        }
    }

    #[test]
    fn a_shorter_lifetime_in_the_settings_holds_for_leaves_that_are_there() {
        let signing = facts("A", "A", start(), AUTHORITY_LIFETIME);
        let leaf = Leaf {
            facts: facts("leaf", "A", start(), LEAF),
            bundle: "A".to_owned(),
            bundle_since: None,
        };
        let wanted = LeafWanted {
            name: "demo.default.hearth",
            usage: Usage::Both,
            signing: &signing,
            trusted: &["A".to_owned()],
            bundle: "A",
            lifetime: 3 * HOUR,
        };
        assert_eq!(
            leaf_due(Some(&leaf), wanted, start()),
            LeafAction::Nothing(at(2 * HOUR))
        );
        assert_eq!(
            leaf_due(Some(&leaf), wanted, at(2 * HOUR)),
            LeafAction::Issue
        );
    }
}
