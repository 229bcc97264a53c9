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

/// All wanted models, with their progress.
#[derive(Debug, Default)]
pub(super) struct Fetches {
    wanted: BTreeMap<Key, Wanted>,
    /// Progress by model and node.
    seen: BTreeMap<(String, String), Seen>,
    /// The commit that the first node told of a model of a hub, by model.
    commits: BTreeMap<String, String>,
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
    view: FetchView,
    /// The commit that the node has, of a model of a hub; otherwise empty.
    commit: String,
    asked: Instant,
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
                Some((node.clone(), seen.view.clone()))
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
                let (bytes, size_bytes, has_failed) = match seen.view {
                    FetchView::Unknown(_) => return None,
                    FetchView::Fetching {
                        bytes, total_bytes, ..
                    } => (bytes, total_bytes, false),
                    FetchView::Ready { bytes, .. } => (bytes, bytes, false),
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
                        FetchView::Ready { .. } => READY_EVERY,
                        FetchView::Failed(_) => FAILED_EVERY,
                        FetchView::Fetching { .. } | FetchView::Unknown(_) => Duration::ZERO,
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
            let reads = |seen: &Seen| matches!(&seen.view, FetchView::Fetching { from_node: Some(from), .. } if from == giver);
            of_model().filter(|(_, seen)| reads(seen)).count()
        };
        let has_it =
            |seen: &Seen| matches!(seen.view, FetchView::Ready { .. }) && seen.commit == *commit;
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
        let wants = |wish: &Wanted| wish.key == *key && wish.nodes.contains(&poll.node);
        let waiting = self.wanted.iter().filter(|(_, wish)| wants(wish));
        let waiting: Vec<Key> = waiting.map(|(deployment, _)| deployment.clone()).collect();
        if waiting.is_empty() {
            return waiting;
        }
        let view = match commit.is_empty() {
            true => view,
            false => self.of_one_commit(poll, view, &commit),
        };
        let place = (key.clone(), poll.node.clone());
        let before = self.seen.get(&place).map(|seen| &seen.view);
        let is_news = before.is_none_or(|before| is_news(before, &view));
        let seen = Seen {
            view,
            commit,
            asked: now,
        };
        self.seen.insert(place, seen);
        if is_news { waiting } else { Vec::new() }
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
mod tests {
    use hearth_crds::{HttpSource, HuggingFaceSource, SecretRef};

    use super::*;

    fn source(url: &str, digit: char) -> ModelSource {
        ModelSource {
            http: Some(HttpSource {
                url: url.to_owned(),
                sha256: digit.to_string().repeat(64),
                secret_ref: None,
            }),
            ..ModelSource::default()
        }
    }

    fn hub() -> ModelSource {
        ModelSource {
            hugging_face: Some(HuggingFaceSource {
                repo: "a/b".to_owned(),
                revision: None,
                token_secret_ref: None,
            }),
            ..ModelSource::default()
        }
    }

    fn key_of(source: &ModelSource, namespace: &str) -> String {
        source.store_key(namespace).unwrap()
    }

    fn fetching(bytes: u64) -> FetchView {
        FetchView::Fetching {
            bytes,
            total_bytes: 1000,
            bytes_per_second: 5,
            from_node: None,
        }
    }

    fn told(commit: &str) -> Answer {
        Answer {
            view: fetching(7),
            commit: commit.to_owned(),
        }
    }

    fn nodes(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_wish_is_asked_for_until_it_is_there_and_forgotten_with_its_deployment() {
        let (mut fetches, demo) = (Fetches::default(), Key::new("default", "demo"));
        let source = source("http://nas/m.tar", 'a');
        let (now, key) = (Instant::now(), key_of(&source, "default"));
        assert!(fetches.due(now).is_empty());
        fetches.want(&demo, &source, &nodes(&["a", "b"]), None);
        let polls = fetches.due(now);
        assert_eq!(
            polls.iter().map(|poll| &*poll.node).collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert!(fetches.views(&key).is_empty());

        assert_eq!(
            fetches.learn(&polls[0], fetching(0).into(), now),
            std::slice::from_ref(&demo)
        );
        assert!(
            fetches.learn(&polls[0], fetching(9).into(), now).is_empty(),
            "less than a percent"
        );
        assert_eq!(
            fetches.learn(&polls[0], fetching(10).into(), now),
            std::slice::from_ref(&demo)
        );
        assert_eq!(fetches.views(&key)["a"], fetching(10));
        let told = fetches.all();
        assert_eq!(
            (told.len(), &told[0].deployment, &*told[0].node),
            (1, &demo, "a")
        );
        assert_eq!(
            (told[0].bytes, told[0].size_bytes, told[0].has_failed),
            (10, 1000, false)
        );
        assert_eq!(fetches.due(now).len(), 2);

        let failed = FetchView::Failed("no such file".to_owned());
        assert_eq!(
            fetches.learn(&polls[0], failed.clone().into(), now).len(),
            1
        );
        assert!(fetches.learn(&polls[0], failed.into(), now).is_empty());
        assert_eq!(
            fetches.due(now).len(),
            1,
            "a failed fetch is left alone for a while"
        );
        assert_eq!(fetches.due(now + FAILED_EVERY).len(), 2);

        fetches.want(&demo, &ModelSource::default(), &[], None);
        assert!(
            fetches.due(now).is_empty()
                && fetches.views(&key).is_empty()
                && fetches.keys().is_empty()
        );
        assert!(
            fetches
                .learn(&polls[0], fetching(11).into(), now)
                .is_empty()
        );
        assert!(fetches.views(&key).is_empty(), "a late answer is nobody's");
    }

    #[test]
    fn deployments_share_a_fetch_where_all_may_have_what_it_gives() {
        let mut fetches = Fetches::default();
        let [one, two, three, four] =
            ["one", "two", "three", "four"].map(|name| Key::new(&name[..1], name));
        let public = source("http://nas/m.tar", 'a');
        let mirror = source("http://mirror/m.tar", 'a');
        let mut private = public.clone();
        private.http.as_mut().unwrap().secret_ref = Some(SecretRef {
            name: "nas".to_owned(),
        });
        fetches.want(&one, &public, &nodes(&["a"]), None);
        fetches.want(&two, &public, &nodes(&["a", "b"]), None);
        fetches.want(&three, &mirror, &nodes(&["a"]), None);
        fetches.want(&four, &private, &nodes(&["a"]), None);
        let now = Instant::now();
        let polls = fetches.due(now);
        assert_eq!((polls.len(), fetches.keys().len()), (4, 3));
        let key = key_of(&public, "o");
        let poll = polls
            .iter()
            .find(|poll| poll.key == key && poll.node == "a");
        let poll = poll.expect("a poll for both");
        assert_eq!(
            fetches.learn(poll, fetching(1).into(), now),
            [one.clone(), two]
        );
        assert!(fetches.views(&key_of(&mirror, "t")).is_empty());
        // The digest and the URL of someone else's private model.
        assert_ne!(key_of(&private, "f"), key);
        assert_ne!(key_of(&private, "f"), key_of(&private, "o"));
        fetches.want(&one, &ModelSource::default(), &[], None);
        let known = BTreeMap::from([("a".to_owned(), fetching(1))]);
        assert_eq!(fetches.views(&key), known);
    }

    #[test]
    fn all_nodes_of_a_branch_have_the_commit_that_the_first_one_tells() {
        let mut fetches = Fetches::default();
        let demo = Key::new("default", "demo");
        let source = hub();
        let key = key_of(&source, "default");
        fetches.want(&demo, &source, &nodes(&["a", "b"]), None);
        let now = Instant::now();
        let polls = fetches.due(now);
        assert_eq!((polls.len(), &*polls[0].node), (1, "a"));
        // One that does not answer is not waited for.
        let silent = FetchView::Unknown("no agent".to_owned());
        fetches.learn(&polls[0], silent.into(), now);
        let polls = fetches.due(now + FAILED_EVERY);
        assert_eq!(
            (polls.len(), &*polls[0].node, &*polls[0].commit),
            (1, "b", "")
        );
        fetches.learn(&polls[0], told("c1"), now);
        let polls = fetches.due(now);
        assert_eq!(
            (polls.len(), &*polls[0].node, &*polls[0].commit),
            (2, "a", "c1")
        );
        // A node that has another one, from before the operator knew of any.
        fetches.learn(&polls[0], told("c2"), now);
        let views = fetches.views(&key);
        assert!(
            matches!(&views["a"], FetchView::Failed(why) if why.contains("c2") && why.contains("c1"))
        );
        assert_eq!(views["b"], fetching(7));
        // Forgotten with the last deployment that wants it.
        fetches.want(&demo, &source, &[], None);
        fetches.want(&demo, &source, &nodes(&["b"]), None);
        assert_eq!(fetches.due(now)[0].commit, "");
    }

    #[test]
    fn nodes_that_have_the_commit_give_it_and_those_with_the_fewest_readers_first() {
        let mut fetches = Fetches::default();
        let demo = Key::new("default", "demo");
        let source = hub();
        fetches.want(&demo, &source, &nodes(&["a", "b", "c", "d", "e"]), None);
        let poll = |node: &str, commit: &str| Poll {
            node: node.to_owned(),
            namespace: Arc::clone(&demo.namespace),
            key: key_of(&source, "default"),
            source: source.clone(),
            commit: commit.to_owned(),
        };
        let facts = include_str!("../../../../models/hearth-demo/facts.json");
        let ready = |commit: &str| Answer {
            view: FetchView::Ready {
                facts: serde_json::from_str(facts).unwrap(),
                bytes: 1000,
            },
            commit: commit.to_owned(),
        };
        let now = Instant::now();
        assert!(fetches.givers(&poll("e", "c1")).is_empty());
        for (node, answer) in [
            ("a", ready("c1")),
            ("b", ready("c1")),
            // Another commit, and none that is known.
            ("c", ready("c2")),
            ("d", ready("")),
        ] {
            fetches.learn(&poll(node, "c1"), answer, now);
        }
        assert_eq!(fetches.givers(&poll("e", "c1")), ["a", "b"]);
        assert_eq!(fetches.givers(&poll("a", "c1")), ["b"]);
        assert!(fetches.givers(&poll("e", "")).is_empty());
        let from_a = FetchView::Fetching {
            bytes: 7,
            total_bytes: 1000,
            bytes_per_second: 5,
            from_node: Some("a".to_owned()),
        };
        fetches.learn(&poll("d", "c1"), from_a.into(), now);
        assert_eq!(fetches.givers(&poll("e", "c1")), ["b", "a"]);
        // Somebody else's model, and an archive.
        let other = Poll {
            key: key_of(&source, "other") + "0",
            ..poll("e", "c1")
        };
        assert!(fetches.givers(&other).is_empty());
        let archive = Poll {
            source: self::source("http://nas/m.tar", 'a'),
            ..poll("e", "c1")
        };
        assert!(fetches.givers(&archive).is_empty());
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
            matches!(answer_of(ready).view, FetchView::Failed(why) if why.contains("another version"))
        );
        assert!(matches!(answer_of(answer).view, FetchView::Unknown(_)));
    }
}
