//! Fetches as the agents tell of them.

use hearth_crds::{HttpSource, HuggingFaceSource, SecretRef};

use super::*;

fn source(url: &str, digit: char) -> ModelSource {
    ModelSource {
        http: Some(HttpSource {
            url: url.to_owned(),
            sha256: digit.to_string().repeat(64),
            ..HttpSource::default()
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
        fetches.due(now).is_empty() && fetches.views(&key).is_empty() && fetches.keys().is_empty()
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
    let facts = include_str!("../../../../../models/hearth-demo/facts.json");
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

#[test]
fn a_node_whose_agent_is_replaced_in_mid_fetch_is_waited_for_a_while() {
    let mut fetches = Fetches::default();
    let demo = Key::new("default", "demo");
    let source = hub();
    let key = key_of(&source, "default");
    fetches.want(&demo, &source, &nodes(&["a"]), None);
    let began = Instant::now();
    let poll = fetches.due(began).remove(0);
    fetches.learn(&poll, told("c1"), began);
    let why = || "no agent".to_owned();
    let standing = |bytes| FetchView::Fetching {
        bytes,
        total_bytes: 1000,
        bytes_per_second: 0,
        from_node: None,
    };
    let at = |seconds| began + Duration::from_secs(seconds);
    for seconds in [2, 59] {
        fetches.silent(&poll, why(), at(seconds));
        assert_eq!(fetches.views(&key)["a"], standing(7), "{seconds} s");
    }
    // Its successor does not know at first how far it is, then goes on, and is then waited for as long.
    let blank = FetchView::Fetching {
        bytes: 0,
        total_bytes: 0,
        bytes_per_second: 0,
        from_node: None,
    };
    fetches.learn(&poll, blank.into(), at(60));
    assert_eq!(fetches.views(&key)["a"], standing(7));
    fetches.learn(&poll, fetching(9).into(), at(60));
    assert_eq!(fetches.views(&key)["a"], fetching(9));
    fetches.silent(&poll, why(), at(119));
    assert_eq!(fetches.views(&key)["a"], standing(9));
    let woken = fetches.silent(&poll, why(), at(120));
    assert_eq!(
        woken,
        std::slice::from_ref(&demo),
        "another node is to be asked"
    );
    assert_eq!(fetches.views(&key)["a"], FetchView::Unknown(why()));
    // One that answers without having the model is not silent.
    fetches.learn(&poll, fetching(9).into(), at(121));
    let absent = FetchView::Unknown("an older version".to_owned());
    let woken = fetches.learn(&poll, absent.clone().into(), at(122));
    assert_eq!((woken, &fetches.views(&key)["a"]), (vec![demo], &absent));
}

#[test]
fn an_operator_that_has_just_started_waits_for_agents_that_have_told_nothing_yet() {
    let (mut fetches, demo) = (Fetches::default(), Key::new("default", "demo"));
    let source = hub();
    let key = key_of(&source, "default");
    let began = Instant::now();
    let at = |seconds| began + Duration::from_secs(seconds);
    fetches.wait_for_first_words(began + SILENCE);
    fetches.want(&demo, &source, &nodes(&["a", "b"]), None);
    let why = || "no agent".to_owned();
    let a = fetches.due(began).remove(0);
    assert!(fetches.silent(&a, why(), at(1)).is_empty());
    assert!(fetches.views(&key).is_empty() && fetches.all().is_empty());
    // The other node has its turn meanwhile, and tells the commit.
    let b = fetches.due(at(2)).remove(0);
    assert_eq!((&*a.node, &*b.node), ("a", "b"));
    fetches.learn(&b, told("c1"), at(2));
    fetches.silent(&a, why(), at(59));
    assert_eq!(fetches.views(&key).keys().collect::<Vec<_>>(), ["b"]);
    // One that comes up in time is where it was, and is then waited for as any other.
    let woken = fetches.learn(&a, told("c1"), at(59));
    assert_eq!(woken, std::slice::from_ref(&demo));
    fetches.silent(&a, why(), at(61));
    assert!(matches!(
        fetches.views(&key)["a"],
        FetchView::Fetching { .. }
    ));

    // One that does not is judged then, and later ones at once.
    fetches.want(&demo, &source, &nodes(&["c"]), None);
    let c = fetches.due(at(59)).remove(0);
    assert!(fetches.silent(&c, why(), at(59)).is_empty());
    let woken = fetches.silent(&c, why(), at(60));
    assert_eq!(woken, std::slice::from_ref(&demo));
    assert_eq!(fetches.views(&key)["c"], FetchView::Unknown(why()));
    fetches.want(&demo, &source, &nodes(&["d"]), None);
    let d = fetches.due(at(61)).remove(0);
    assert_eq!(fetches.silent(&d, why(), at(61)), [demo]);
    // What is not wanted any more leaves nothing behind.
    fetches.wait_for_first_words(at(200));
    assert!(fetches.silent(&c, why(), at(62)).is_empty());
    assert_eq!(fetches.seen.len(), 1);
}
