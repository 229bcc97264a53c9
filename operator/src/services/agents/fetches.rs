//! Models that are wanted on nodes, and their progress: state without clock or client.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use hearth_controller_core::key::Key;
use hearth_controller_core::observed::FetchView;
use hearth_crds::{HttpSource, ModelFacts};
use hearth_transport::v1::{ModelResponse, ModelState};
use tokio::time::Instant;

/// Interval at which a model that is in place is polled: its node's disk may have been replaced.
const READY_EVERY: Duration = Duration::from_secs(60);
/// Interval at which a failed model is polled; its agent retries it with growing delays.
const FAILED_EVERY: Duration = Duration::from_secs(10);

/// All wanted models, with their progress.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    wanted: BTreeMap<Key, Wanted>,
    /// Progress by model and node.
    seen: BTreeMap<(String, String), Seen>,
}

#[derive(Debug)]
struct Wanted {
    /// Name of the model in the nodes' stores.
    key: String,
    source: HttpSource,
    nodes: BTreeSet<String>,
}

#[derive(Debug)]
struct Seen {
    view: FetchView,
    asked: Instant,
}

/// A request to one agent.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Poll {
    pub(super) node: String,
    /// Namespace of a deployment that wants it, whose Secrets open the URL.
    pub(super) namespace: Arc<str>,
    /// Name of the model in the nodes' stores.
    pub(super) key: String,
    pub(super) source: HttpSource,
}

impl Fetches {
    /// See [`super::Agents::want`].
    pub(super) fn want(&mut self, deployment: &Key, source: Option<&HttpSource>, nodes: &[String]) {
        match source {
            Some(source) if !nodes.is_empty() => {
                let wanted = Wanted {
                    key: source.store_key(&deployment.namespace),
                    source: source.clone(),
                    nodes: nodes.iter().cloned().collect(),
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
    }

    /// Progress of a model, by polled node.
    pub(super) fn views(&self, key: &str) -> BTreeMap<String, FetchView> {
        let wishes = self.wanted.values().filter(|wish| wish.key == key);
        let nodes: BTreeSet<&String> = wishes.flat_map(|wish| &wish.nodes).collect();
        nodes
            .into_iter()
            .filter_map(|node| {
                let seen = self.seen.get(&(key.to_owned(), node.clone()))?;
                Some((node.clone(), seen.view.clone()))
            })
            .collect()
    }

    /// Names of the wanted models.
    pub(super) fn keys(&self) -> BTreeSet<String> {
        self.wanted.values().map(|wish| wish.key.clone()).collect()
    }

    /// Polls that are due now. An agent is polled once for deployments that share a model.
    pub(super) fn due(&self, now: Instant) -> Vec<Poll> {
        let mut polls: BTreeMap<(&str, &String), Poll> = BTreeMap::new();
        for (deployment, wish) in &self.wanted {
            for node in &wish.nodes {
                let key = &*wish.key;
                let seen = self.seen.get(&(key.to_owned(), node.clone()));
                let is_due = seen.is_none_or(|seen| {
                    let every = match seen.view {
                        FetchView::Ready { .. } => READY_EVERY,
                        FetchView::Failed(_) => FAILED_EVERY,
                        FetchView::Fetching { .. } | FetchView::Unknown(_) => Duration::ZERO,
                    };
                    now.duration_since(seen.asked) >= every
                });
                if is_due {
                    polls.entry((key, node)).or_insert_with(|| Poll {
                        node: node.clone(),
                        namespace: Arc::clone(&deployment.namespace),
                        key: wish.key.clone(),
                        source: wish.source.clone(),
                    });
                }
            }
        }
        polls.into_values().collect()
    }

    /// Stores an answer; returns the deployments that it affects.
    pub(super) fn learn(&mut self, poll: &Poll, view: FetchView, now: Instant) -> Vec<Key> {
        let key = &poll.key;
        let waiting: Vec<Key> = self
            .wanted
            .iter()
            .filter(|(_, wish)| wish.key == *key && wish.nodes.contains(&poll.node))
            .map(|(deployment, _)| deployment.clone())
            .collect();
        if waiting.is_empty() {
            return waiting;
        }
        let place = (key.clone(), poll.node.clone());
        let before = self.seen.get(&place).map(|seen| &seen.view);
        let is_news = before.is_none_or(|before| is_news(before, &view));
        self.seen.insert(place, Seen { view, asked: now });
        if is_news { waiting } else { Vec::new() }
    }
}

/// Whether the difference is worth reporting: whole percents are, single bytes are not.
fn is_news(before: &FetchView, after: &FetchView) -> bool {
    let percent = |view: &FetchView| match view {
        FetchView::Fetching {
            bytes, total_bytes, ..
        } => Some((
            bytes.saturating_mul(100).checked_div(*total_bytes),
            *total_bytes,
        )),
        _ => None,
    };
    match (percent(before), percent(after)) {
        (Some(before), Some(after)) => before != after,
        _ => before != after,
    }
}

/// Converts an agent's answer.
pub(super) fn view_of(answer: ModelResponse) -> FetchView {
    let state = answer.state();
    let ModelResponse {
        state: _,
        bytes,
        total_bytes,
        bytes_per_second,
        message,
        facts_json,
    } = answer;
    match state {
        ModelState::Fetching => FetchView::Fetching {
            bytes,
            total_bytes,
            bytes_per_second,
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
    }
}

#[cfg(test)]
mod tests {
    use hearth_crds::SecretRef;

    use super::*;

    fn source(url: &str, digit: char) -> HttpSource {
        HttpSource {
            url: url.to_owned(),
            sha256: digit.to_string().repeat(64),
            secret_ref: None,
        }
    }

    fn fetching(bytes: u64) -> FetchView {
        FetchView::Fetching {
            bytes,
            total_bytes: 1000,
            bytes_per_second: 5,
        }
    }

    fn nodes(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_wish_is_asked_for_until_it_is_there_and_forgotten_with_its_deployment() {
        let (mut fetches, demo) = (Fetches::default(), Key::new("default", "demo"));
        let source = source("http://nas/m.tar", 'a');
        let (now, key) = (Instant::now(), source.store_key("default"));
        assert!(fetches.due(now).is_empty());
        fetches.want(&demo, Some(&source), &nodes(&["a", "b"]));
        let polls = fetches.due(now);
        assert_eq!(
            polls.iter().map(|poll| &*poll.node).collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert!(fetches.views(&key).is_empty());

        assert_eq!(
            fetches.learn(&polls[0], fetching(0), now),
            std::slice::from_ref(&demo)
        );
        assert!(
            fetches.learn(&polls[0], fetching(9), now).is_empty(),
            "less than a percent"
        );
        assert_eq!(
            fetches.learn(&polls[0], fetching(10), now),
            std::slice::from_ref(&demo)
        );
        assert_eq!(fetches.views(&key)["a"], fetching(10));
        assert_eq!(fetches.due(now).len(), 2);

        let failed = FetchView::Failed("no such file".to_owned());
        assert_eq!(fetches.learn(&polls[0], failed.clone(), now).len(), 1);
        assert!(fetches.learn(&polls[0], failed, now).is_empty());
        assert_eq!(
            fetches.due(now).len(),
            1,
            "a failed fetch is left alone for a while"
        );
        assert_eq!(fetches.due(now + FAILED_EVERY).len(), 2);

        fetches.want(&demo, None, &[]);
        assert!(
            fetches.due(now).is_empty()
                && fetches.views(&key).is_empty()
                && fetches.keys().is_empty()
        );
        assert!(fetches.learn(&polls[0], fetching(11), now).is_empty());
        assert!(fetches.views(&key).is_empty(), "a late answer is nobody's");
    }

    #[test]
    fn deployments_share_a_fetch_where_all_may_have_what_it_gives() {
        let mut fetches = Fetches::default();
        let [one, two, three, four] =
            ["one", "two", "three", "four"].map(|name| Key::new(&name[..1], name));
        let public = source("http://nas/m.tar", 'a');
        let mirror = source("http://mirror/m.tar", 'a');
        let private = HttpSource {
            secret_ref: Some(SecretRef {
                name: "nas".to_owned(),
            }),
            ..public.clone()
        };
        fetches.want(&one, Some(&public), &nodes(&["a"]));
        fetches.want(&two, Some(&public), &nodes(&["a", "b"]));
        fetches.want(&three, Some(&mirror), &nodes(&["a"]));
        fetches.want(&four, Some(&private), &nodes(&["a"]));
        let now = Instant::now();
        let polls = fetches.due(now);
        assert_eq!((polls.len(), fetches.keys().len()), (4, 3));
        let key = public.store_key("o");
        let poll = polls
            .iter()
            .find(|poll| poll.key == key && poll.node == "a");
        let poll = poll.expect("a poll for both");
        assert_eq!(fetches.learn(poll, fetching(1), now), [one.clone(), two]);
        assert!(fetches.views(&mirror.store_key("t")).is_empty());
        // The digest and the URL of someone else's private model.
        assert_ne!(private.store_key("f"), key);
        assert_ne!(private.store_key("f"), private.store_key("o"));
        fetches.want(&one, None, &[]);
        let known = BTreeMap::from([("a".to_owned(), fetching(1))]);
        assert_eq!(fetches.views(&key), known);
    }

    #[test]
    fn an_answer_of_another_version_is_a_failure_that_says_so() {
        let answer = ModelResponse {
            facts_json: "{}".to_owned(),
            ..ModelResponse::default()
        };
        let ready = ModelResponse {
            state: ModelState::Ready.into(),
            ..answer.clone()
        };
        assert!(
            matches!(view_of(ready), FetchView::Failed(why) if why.contains("another version"))
        );
        assert!(matches!(view_of(answer), FetchView::Unknown(_)));
    }
}
