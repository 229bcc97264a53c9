//! The operator is killed before and after every single write that it makes, while a deployment is created, changed,
//! scaled and deleted; another one takes over. Each run reaches the same end state with nothing left over; and
//! whenever the deployment reports Ready, before, during and after, a request would be answered.
//! This covers the operator's own writes: without agents and leader election, for a model that needs no inspection.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Options, condition, wait_until};
use hearth_tests::operator::{Kill, Operator, Proxy, Side, Stand, is_settled};
use serde_json::{Value, json};

/// Concurrent runs: an operator spends most of its time waiting.
const RUNS: usize = 6;
/// Longest duration of one run.
const PATIENCE: Duration = Duration::from_secs(90);
/// Time without writes after which a run has ended.
const QUIET: Duration = Duration::from_millis(1200);
/// Upper bound of any scenario's number of writes.
const MOST_WRITES: u64 = 120;

/// Operation during which the operator dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scenario {
    /// A deployment is created.
    Create,
    /// Its plan changes, and the nodes have room for both plans.
    Surge,
    /// Its plan changes, and they do not have room.
    OldDownFirst,
    /// The scale subresource sets another number.
    Scale,
    /// It is deleted in the middle of a change: nothing may be written for a deployment that is gone.
    Delete,
}

#[test]
fn a_new_deployment() {
    crash_everywhere(Scenario::Create);
}

#[test]
fn a_change_with_room_for_both_plans() {
    crash_everywhere(Scenario::Surge);
}

#[test]
fn a_change_without_room_for_both_plans() {
    crash_everywhere(Scenario::OldDownFirst);
}

#[test]
fn another_number_of_workers() {
    crash_everywhere(Scenario::Scale);
}

#[test]
fn a_deletion() {
    crash_everywhere(Scenario::Delete);
}

/// Runs a scenario undisturbed, then repeatedly with a crash at its first write, its second and so on, until no write
/// is left to crash at.
fn crash_everywhere(scenario: Scenario) {
    let options = Options {
        controllers: true,
        ..Options::default()
    };
    let Some(stand) = Stand::start_or_skip(&options) else {
        return;
    };
    stand.make_node("large", 16, 16 << 30, &[("size", "large")]);
    stand.make_node("small", 2, 700 << 20, &[("size", "small")]);
    let checked = AtomicU64::new(0);
    let (expected, _) = run(&stand, scenario, "undisturbed", None, &checked);
    if scenario == Scenario::Delete {
        assert_only_its_own_is_left(&stand);
    }

    let next = AtomicU64::new(0);
    let last = AtomicU64::new(u64::MAX);
    let wrong = Mutex::new(Vec::new());
    let crashes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..RUNS {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let write = index / 2 + 1;
                    let side = if index.is_multiple_of(2) {
                        Side::Before
                    } else {
                        Side::After
                    };
                    if write > last.load(Ordering::Relaxed) {
                        return;
                    }
                    assert!(write < MOST_WRITES, "it goes on writing");
                    let name = format!("{side:?}-{write}").to_lowercase();
                    let kill = Kill { write, side };
                    let began = Instant::now();
                    let (end, has_crashed) = run(&stand, scenario, &name, Some(kill), &checked);
                    println!(
                        "{scenario:?} {name}: {:.1} s",
                        began.elapsed().as_secs_f64()
                    );
                    if has_crashed {
                        crashes.fetch_add(1, Ordering::Relaxed);
                    } else {
                        // The scenario has fewer writes than that.
                        last.fetch_min(write, Ordering::Relaxed);
                    }
                    if end != expected {
                        let mut wrong = wrong.lock().unwrap_or_else(PoisonError::into_inner);
                        wrong.push((name, end));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap_or_else(PoisonError::into_inner);
    let crashes = crashes.into_inner();
    let checked = checked.into_inner();
    println!("{scenario:?}: {crashes} crashes, Ready looked into {checked} times");
    assert!(crashes > 3, "{crashes} crashes are too few");
    assert!(checked > 0, "no deployment was seen to be Ready");
    if let Some((name, end)) = wrong.first() {
        let names: Vec<&str> = wrong.iter().map(|(name, _)| name.as_str()).collect();
        panic!(
            "{scenario:?}: {} of {crashes} crashes end otherwise: {}\nthe first, {name}:\n{}",
            wrong.len(),
            names.join(" "),
            difference(&expected, end)
        );
    }
}

/// Asserts that a deletion leaves only the operator's own objects.
fn assert_only_its_own_is_left(stand: &Stand) {
    let left = stand.objects("delete-undisturbed");
    let names: Vec<&Value> = left
        .iter()
        .map(|object| &object["metadata"]["name"])
        .collect();
    assert_eq!(names, ["hearth-agent-tls", "hearth-ca"], "left over");
}

/// Runs a scenario once in its own namespace; returns the final objects, and whether the operator was killed.
/// `checked` counts the times that a deployment reported Ready and was verified.
fn run(
    stand: &Stand,
    scenario: Scenario,
    name: &str,
    kill: Option<Kill>,
    checked: &AtomicU64,
) -> (String, bool) {
    let namespace = format!("{scenario:?}-{name}").to_lowercase();
    stand.make_namespace(&namespace);
    let proxy = stand.proxy();
    // Each run behaves as if it had the nodes to itself: it does not see the Pods of concurrent runs.
    let alone = [
        "--ledger-all-pods=false",
        "--ledger-unseen-cpu=0",
        "--ledger-unseen-memory=1Mi",
    ];
    let arguments = [&["--namespaces", &namespace, "--resync", "20s"][..], &alone].concat();
    let mut operator = Operator::start(proxy.address, &namespace, &arguments);
    let size = if scenario == Scenario::OldDownFirst {
        "small"
    } else {
        "large"
    };
    let spec = spec(size, 2048);
    if scenario != Scenario::Create {
        stand.make_deployment(&namespace, "demo", &spec);
        wait_for_end(stand, &proxy, &mut operator, &namespace, false, checked);
    }
    if let Some(kill) = kill {
        proxy.kill(kill, operator.pid());
    }
    match scenario {
        Scenario::Create => stand.make_deployment(&namespace, "demo", &spec),
        Scenario::Surge | Scenario::OldDownFirst => {
            let fields = json!({"spec": {"model": {"contextLength": 1024}}});
            stand.patch_deployment(&namespace, "demo", "", &fields);
        }
        Scenario::Scale => {
            let fields = json!({"spec": {"replicas": 2}});
            stand.patch_deployment(&namespace, "demo", "/scale", &fields);
        }
        Scenario::Delete => {
            let before = proxy.write_count();
            let fields = json!({"spec": {"model": {"contextLength": 1024}}});
            stand.patch_deployment(&namespace, "demo", "", &fields);
            wait_until("the change is under way", PATIENCE, || {
                (proxy.write_count() >= before + 3 || proxy.has_killed()).then_some(())
            });
            stand.delete_deployment(&namespace, "demo");
        }
    }
    let is_gone = scenario == Scenario::Delete;
    wait_for_end(stand, &proxy, &mut operator, &namespace, is_gone, checked);
    (stand.dump(&namespace), proxy.has_killed())
}

/// Waits until the deployment is as it should be, or gone with everything it owned, and writes have stopped; restarts
/// an operator that was killed.
fn wait_for_end(
    stand: &Stand,
    proxy: &Proxy,
    operator: &mut Operator,
    namespace: &str,
    is_gone: bool,
    checked: &AtomicU64,
) {
    let began = Instant::now();
    let mut seen = (usize::MAX, String::new());
    let mut quiet_since = Instant::now();
    loop {
        if let Some(status) = operator.ended() {
            assert!(proxy.has_killed(), "ended: {status}\n{}", operator.log());
            operator.restart();
        }
        std::thread::sleep(Duration::from_millis(150));
        let objects = stand.objects(namespace);
        let now = (proxy.write_count(), versions(&objects));
        if now != seen {
            seen = now;
            quiet_since = Instant::now();
        }
        if assert_ready_is_true(stand, namespace, &objects) {
            checked.fetch_add(1, Ordering::Relaxed);
        }
        let is_there = |kind: &str| objects.iter().any(|object| object["kind"] == kind);
        let is_done = if is_gone {
            !is_there("inferencedeployments") && !is_there("pods")
        } else {
            let mut deployments = objects
                .iter()
                .filter(|o| o["kind"] == "inferencedeployments");
            deployments.all(is_settled) && is_there("pods")
        };
        if is_done && quiet_since.elapsed() > QUIET {
            return;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "{namespace} does not come to an end\n{}\n{}",
            stand.dump(namespace),
            operator.log()
        );
    }
}

/// Asserts that while the deployment was Ready, before and after its Pods were read, some ready gateway had a route to
/// a ready decode worker; and that they belong to the plan in the status if nothing is in progress. Returns whether it
/// was Ready.
fn assert_ready_is_true(stand: &Stand, namespace: &str, before: &[Value]) -> bool {
    let ready = |objects: &[Value]| -> Option<Value> {
        let mut deployments = objects
            .iter()
            .filter(|o| o["kind"] == "inferencedeployments");
        let found = deployments.find(|found| condition(found, "Ready") == Some("True"))?;
        found["metadata"]["deletionTimestamp"]
            .is_null()
            .then(|| found.clone())
    };
    let Some(first) = ready(before) else {
        return false;
    };
    let between = stand.objects(namespace);
    let version = |found: &Value| found["metadata"]["resourceVersion"].clone();
    let is_same = |found: Value| version(&found) == version(&first);
    if !ready(&stand.objects(namespace)).is_some_and(is_same) {
        return false;
    }
    let is_current = first["status"]["observedGeneration"] == first["metadata"]["generation"]
        && condition(&first, "Progressing") == Some("False");
    let plan = first["status"]["plan"]["generation"].to_string();
    let open: Vec<&Value> = between
        .iter()
        .filter(|pod| pod["kind"] == "pods" && condition(pod, "Ready") == Some("True"))
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null())
        .filter(|pod| {
            !is_current || pod["metadata"]["annotations"]["hearth.dev/plan-generation"] == *plan
        })
        .collect();
    let of_role = |role: &'static str| {
        let open = open.iter();
        open.filter(move |pod| pod["metadata"]["labels"]["hearth.dev/role"] == role)
    };
    let answers = of_role("gateway").any(|gateway| {
        let routes = &gateway["metadata"]["annotations"]["hearth.dev/routes"];
        of_role("decode").any(|worker| {
            let address = worker["status"]["podIP"].as_str().unwrap_or("none");
            routes
                .as_str()
                .is_some_and(|routes| routes.contains(&format!("{address}:9400")))
        })
    });
    assert!(
        answers,
        "{namespace} says Ready, and nobody answers{}: {first:#}\n{open:#?}",
        if is_current { " of its plan" } else { "" }
    );
    true
}

fn versions(objects: &[Value]) -> String {
    let version = |object: &Value| object["metadata"]["resourceVersion"].to_string();
    objects.iter().map(version).collect()
}

fn spec(size: &str, context: u32) -> Value {
    json!({
        "model": {"source": {"builtin": {"name": "hearth-demo"}}, "contextLength": context},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1, "maxBatch": 4},
        "placement": {"nodeSelector": {"size": size}},
    })
}

/// Returns the lines that differ, with context.
fn difference(expected: &str, found: &str) -> String {
    let (expected, found): (Vec<&str>, Vec<&str>) =
        (expected.lines().collect(), found.lines().collect());
    let mut text = String::new();
    let same = expected
        .iter()
        .zip(&found)
        .take_while(|(a, b)| a == b)
        .count();
    for line in expected.iter().skip(same.saturating_sub(12)).take(40) {
        text += &format!("- {line}\n");
    }
    for line in found.iter().skip(same.saturating_sub(12)).take(40) {
        text += &format!("+ {line}\n");
    }
    text
}
