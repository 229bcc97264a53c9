//! Models that are wanted on nodes, and their progress: state without clock or client.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_controller_core::key::Key;
use hearth_controller_core::observed::FetchView;
use hearth_crds::{ModelFacts, ModelSource};
use hearth_transport::v1::{ModelResponse, ModelState};
use tokio::time::Instant;

use crate::telemetry::cluster::Fetch;

/// Interval at which a model that is in place is polled: its node's disk may have been replaced.
const READY_EVERY: Duration = Duration::from_secs(60);
/// Interval at which a failed model is polled; its agent retries it with growing delays.
const FAILED_EVERY: Duration = Duration::from_secs(10);
/// Time for which a node whose agent fell silent in mid-fetch still counts as fetching: the agent's successor goes on where it
/// was, and another node would begin anew. An operator that has just started, and knows of no fetch, waits as long for agents that
/// have told it nothing: they often start at the same time.
pub(super) const SILENCE: Duration = Duration::from_secs(60);

/// All wanted models, with their progress.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    wanted: BTreeMap<Key, Wanted>,
    /// Progress by model and node.
    seen: BTreeMap<(String, String), Seen>,
    /// The commit that the first node told of a model of a hub, by model.
    commits: BTreeMap<String, String>,
    /// Until when agents are waited for that have told nothing yet; `None` if they are not.
    first_word_by: Option<Instant>,
}

#[derive(Debug)]
struct Wanted {
    /// Name of the model in the nodes' stores.
    key: String,
    source: ModelSource,
    nodes: BTreeSet<String>,
    /// The commit that the deployment's plans record.
    commit: Option<String>,
}

#[derive(Debug)]
struct Seen {
    /// `None` while an agent that has told nothing yet is waited for.
    view: Option<FetchView>,
    /// The commit that the node has, of a model of a hub; otherwise empty.
    commit: String,
    asked: Instant,
    /// When its agent last answered, or was first asked.
    heard: Instant,
}

/// A request to one agent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Poll {
    pub(super) node: String,
    /// Namespace of a deployment that wants it, whose Secrets open the source.
    pub(super) namespace: Arc<str>,
    /// Name of the model in the nodes' stores.
    pub(super) key: String,
    pub(super) source: ModelSource,
    /// The commit that other nodes have, of a model of a hub; empty if none is known to have it.
    pub(super) commit: String,
}

/// An agent's answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Answer {
    pub(super) view: FetchView,
    /// The commit that the node has, of a model of a hub; otherwise empty.
    pub(super) commit: String,
}

impl From<FetchView> for Answer {
    fn from(view: FetchView) -> Self {
        Self {
            view,
            commit: String::new(),
        }
    }
}

impl Fetches {
    /// Waits until then for agents that have told nothing yet.
    pub(super) fn wait_for_first_words(&mut self, until: Instant) {
        self.first_word_by = Some(until);
    }

    /// See [`super::Agents::want`].
    pub(super) fn want(
        &mut self,
        deployment: &Key,
        source: &ModelSource,
        nodes: &[String],
        commit: Option<&str>,
    ) {
        match source.store_key(&deployment.namespace) {
            Some(key) if !nodes.is_empty() => {
                let wanted = Wanted {
                    key,
                    source: source.clone(),
                    nodes: nodes.iter().cloned().collect(),
                    commit: commit.map(str::to_owned),
                };
                self.wanted.insert(deployment.clone(), wanted);
            }
            _ => {
                self.wanted.remove(deployment);
            }
        }
        let wanted = &self.wanted;
        self.seen.retain(|(key, node), _| {
            wanted
                .values()
                .any(|wish| wish.key == *key && wish.nodes.contains(node))
        });
        self.commits
            .retain(|key, _| wanted.values().any(|wish| wish.key == *key));
    }

    /// The commit of a model of a hub that all nodes are to have: that of plans, which outlives the operator, else the first one that
    /// a node told.
    pub(super) fn commit(&self, key: &str) -> Option<&str> {
        let mut wishes = self.wanted.values().filter(|wish| wish.key == key);
        let of_plans = wishes.find_map(|wish| wish.commit.as_deref());
        of_plans.or_else(|| self.commits.get(key).map(String::as_str))
    }

    /// Progress of a model, by polled node.
    pub(super) fn views(&self, key: &str) -> BTreeMap<String, FetchView> {
        let wishes = self.wanted.values().filter(|wish| wish.key == key);
        let nodes: BTreeSet<&String> = wishes.flat_map(|wish| &wish.nodes).collect();
        nodes
            .into_iter()
            .filter_map(|node| {
                let seen = self.seen.get(&(key.to_owned(), node.clone()))?;
                Some((node.clone(), seen.view.clone()?))
            })
            .collect()
    }

    /// How far each wanted copy of each deployment's model is, as far as a node has told.
    pub(super) fn all(&self) -> Vec<Fetch> {
        let wanted = self.wanted.iter();
        let copies =
            wanted.flat_map(|(key, wish)| wish.nodes.iter().map(move |node| (key, wish, node)));
        copies
            .filter_map(|(deployment, wish, node)| {
                let seen = self.seen.get(&(wish.key.clone(), node.clone()))?;
                let (bytes, size_bytes, has_failed) = match seen.view.as_ref()? {
                    FetchView::Unknown(_) => return None,
                    FetchView::Fetching {
                        bytes, total_bytes, ..
                    } => (*bytes, *total_bytes, false),
                    FetchView::Ready { bytes, .. } => (*bytes, *bytes, false),
                    FetchView::Failed(_) => (0, 0, true),
                };
                Some(Fetch {
                    deployment: deployment.clone(),
                    node: node.clone(),
                    bytes,
                    size_bytes,
                    has_failed,
                })
            })
            .collect()
    }

    /// Names of the wanted models.
    pub(super) fn keys(&self) -> BTreeSet<String> {
        self.wanted.values().map(|wish| wish.key.clone()).collect()
    }

    /// Polls that are due now. An agent is polled once for deployments that share a model. A branch of a hub may move on
    /// between two polls: the nodes are polled one after the other until one tells the commit for all.
    pub(super) fn due(&self, now: Instant) -> Vec<Poll> {
        let mut polls: Vec<Poll> = self.all_due(now).into_values().collect();
        let asked = |poll: &Poll| {
            let seen = self.seen.get(&(poll.key.clone(), poll.node.clone()));
            seen.map(|seen| seen.asked)
        };
        polls.sort_by_key(asked);
        let mut first = BTreeSet::new();
        polls.retain(|poll| {
            let is_pinned = poll.source.hugging_face.is_none() || !poll.commit.is_empty();
            is_pinned || first.insert(poll.key.clone())
        });
        polls
    }

    fn all_due(&self, now: Instant) -> BTreeMap<(&str, &String), Poll> {
        let mut polls: BTreeMap<(&str, &String), Poll> = BTreeMap::new();
        for (deployment, wish) in &self.wanted {
            for node in &wish.nodes {
                let key = &*wish.key;
                let seen = self.seen.get(&(key.to_owned(), node.clone()));
                let is_due = seen.is_none_or(|seen| {
                    let every = match seen.view {
                        Some(FetchView::Ready { .. }) => READY_EVERY,
                        Some(FetchView::Failed(_)) => FAILED_EVERY,
                        Some(FetchView::Fetching { .. } | FetchView::Unknown(_)) | None => {
                            Duration::ZERO
                        }
                    };
                    now.duration_since(seen.asked) >= every
                });
                if is_due {
                    let commit = wish.commit.as_deref().or_else(|| self.commit(key));
                    polls.entry((key, node)).or_insert_with(|| Poll {
                        node: node.clone(),
                        namespace: Arc::clone(&deployment.namespace),
                        key: wish.key.clone(),
                        source: wish.source.clone(),
                        commit: commit.unwrap_or_default().to_owned(),
                    });
                }
            }
        }
        polls
    }

    /// Nodes whose agents may give the model of a poll, those that give it to the fewest others first. There are none
    /// for an archive, whose files have no checksums of their own, and as long as nobody has told the commit.
    pub(super) fn givers(&self, poll: &Poll) -> Vec<String> {
        let Poll {
            node,
            namespace: _,
            key,
            source,
            commit,
        } = poll;
        if source.hugging_face.is_none() || commit.is_empty() {
            return Vec::new();
        }
        let of_model = || self.seen.iter().filter(|((of, _), _)| of == key);
        let readers = |giver: &str| {
            let reads = |seen: &Seen| matches!(&seen.view, Some(FetchView::Fetching { from_node: Some(from), .. }) if from == giver);
            of_model().filter(|(_, seen)| reads(seen)).count()
        };
        let has_it = |seen: &Seen| {
            matches!(seen.view, Some(FetchView::Ready { .. })) && seen.commit == *commit
        };
        let mut givers: Vec<&String> = of_model()
            .filter(|((_, giver), seen)| giver != node && has_it(seen))
            .map(|((_, giver), _)| giver)
            .collect();
        givers.sort_by_key(|giver| readers(giver));
        givers.into_iter().cloned().collect()
    }

    /// Stores an answer; returns the deployments that it affects.
    pub(super) fn learn(&mut self, poll: &Poll, answer: Answer, now: Instant) -> Vec<Key> {
        let key = &poll.key;
        let Answer { view, commit } = answer;
        let waiting = self.waiting(poll);
        if waiting.is_empty() {
            return waiting;
        }
        let view = match commit.is_empty() {
            true => view,
            false => self.of_one_commit(poll, view, &commit),
        };
        let place = (key.clone(), poll.node.clone());
        let before = self.seen.get(&place);
        // An agent that goes on where the one before it was learns how far that is after its first answer.
        let blank = FetchView::Fetching {
            bytes: 0,
            total_bytes: 0,
            bytes_per_second: 0,
            from_node: None,
        };
        let is_blank = view == blank;
        let stood = before.filter(|_| is_blank).and_then(Seen::standing);
        let view = stood.unwrap_or(view);
        let before = before.and_then(|seen| seen.view.as_ref());
        let is_news = before.is_none_or(|before| is_news(before, &view));
        let seen = Seen {
            view: Some(view),
            commit,
            asked: now,
            heard: now,
        };
        self.seen.insert(place, seen);
        if is_news { waiting } else { Vec::new() }
    }

    /// Notes that nothing came from the node's agent, and why; returns the deployments that it affects.
    pub(super) fn silent(&mut self, poll: &Poll, why: String, now: Instant) -> Vec<Key> {
        let place = (poll.key.clone(), poll.node.clone());
        let before = self.seen.get(&place);
        let has_told = before.is_some_and(|before| before.view.is_some());
        if !has_told && self.first_word_by.is_some_and(|until| now < until) {
            self.note_asked(poll, now);
            return Vec::new();
        }
        let held = before.and_then(|before| Some((before.in_silence(now)?, before.heard)));
        let Some((view, heard)) = held else {
            return self.learn(poll, FetchView::Unknown(why).into(), now);
        };
        let woken = self.learn(poll, view.into(), now);
        if let Some(seen) = self.seen.get_mut(&place) {
            seen.heard = heard;
        }
        woken
    }

    /// Notes that an agent was asked that has told nothing yet: others get their turn.
    fn note_asked(&mut self, poll: &Poll, now: Instant) {
        if self.waiting(poll).is_empty() {
            return;
        }
        let place = (poll.key.clone(), poll.node.clone());
        let unheard = Seen {
            view: None,
            commit: String::new(),
            asked: now,
            heard: now,
        };
        self.seen.entry(place).or_insert(unheard).asked = now;
    }

    /// The deployments that want the model of a poll on its node.
    fn waiting(&self, poll: &Poll) -> Vec<Key> {
        let wants = |wish: &Wanted| wish.key == poll.key && wish.nodes.contains(&poll.node);
        let waiting = self.wanted.iter().filter(|(_, wish)| wants(wish));
        waiting.map(|(deployment, _)| deployment.clone()).collect()
    }

    /// Records the commit of a model that a node has. Ranks of one plan must hold the same weights: a node with another
    /// commit than the one that it was asked for, or else is known, does not have the model.
    fn of_one_commit(&mut self, poll: &Poll, view: FetchView, commit: &str) -> FetchView {
        let asked = Some(&*poll.commit).filter(|asked| !asked.is_empty());
        let Some(known) = asked.or_else(|| self.commit(&poll.key)) else {
            self.commits.insert(poll.key.clone(), commit.to_owned());
            return view;
        };
        if known == commit {
            return view;
        }
        FetchView::Failed(format!(
            "the node has commit {commit} of it, and other nodes have {known}\n  name a commit as the revision, so that all nodes fetch the same"
        ))
    }
}

impl Seen {
    /// The fetch as it stood when its agent last answered; `None` if there was none, or that is too long ago.
    fn in_silence(&self, now: Instant) -> Option<FetchView> {
        let is_recent = now.duration_since(self.heard) < SILENCE;
        self.standing().filter(|_| is_recent)
    }

    /// The fetch as it stood, with nothing arriving.
    fn standing(&self) -> Option<FetchView> {
        let Some(FetchView::Fetching {
            bytes, total_bytes, ..
        }) = self.view
        else {
            return None;
        };
        Some(FetchView::Fetching {
            bytes,
            total_bytes,
            bytes_per_second: 0,
            from_node: None,
        })
    }
}

/// Whether the difference is worth reporting: whole percents are, single bytes are not.
fn is_news(before: &FetchView, after: &FetchView) -> bool {
    let percent = |view: &FetchView| match view {
        FetchView::Fetching {
            bytes,
            total_bytes,
            bytes_per_second: _,
            from_node,
        } => Some((
            bytes.saturating_mul(100).checked_div(*total_bytes),
            *total_bytes,
            from_node.clone(),
        )),
        _ => None,
    };
    match (percent(before), percent(after)) {
        (Some(before), Some(after)) => before != after,
        _ => before != after,
    }
}

/// Converts an agent's answer.
pub(super) fn answer_of(answer: ModelResponse) -> Answer {
    let state = answer.state();
    let ModelResponse {
        state: _,
        bytes,
        total_bytes,
        bytes_per_second,
        message,
        facts_json,
        commit,
        from_node,
    } = answer;
    let view = match state {
        ModelState::Fetching => FetchView::Fetching {
            bytes,
            total_bytes,
            bytes_per_second,
            from_node: Some(from_node).filter(|node| !node.is_empty()),
        },
        ModelState::Ready => match serde_json::from_str::<ModelFacts>(&facts_json) {
            Ok(facts) => FetchView::Ready {
                facts: Box::new(facts),
                bytes,
            },
            Err(error) => FetchView::Failed(format!(
                "the agent's facts of the model cannot be read ({error}); is it of another version?"
            )),
        },
        ModelState::Failed => FetchView::Failed(message),
        ModelState::Absent | ModelState::Unspecified => FetchView::Unknown(message),
    };
    Answer { view, commit }
}

#[cfg(test)]
mod tests;
