//! Foreign changes to an operator's objects on a real API server: a newer operator leaves a plan that this one cannot
//! read, and a user recreates its certificate Secret. It reports this, leaves their objects alone, and does not repeat
//! itself.

use std::collections::BTreeSet;
use std::thread::sleep;
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Options, condition, try_wait_until};
use hearth_tests::operator::{Operator, Proxy, Stand, is_settled};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);
/// Observation time: long enough for several of the first backoff delays after a failure.
const WATCHED: Duration = Duration::from_secs(5);
const NAMESPACE: &str = "others";
const SECRET: &str = "demo-hearth-certificates";

/// A fixture with a deployment that is ready.
struct Fixture {
    operator: Operator,
    proxy: Proxy,
    stand: Stand,
}

impl Fixture {
    fn start_or_skip() -> Option<Self> {
        let stand = Stand::start_or_skip(&Options::default())?;
        stand.make_namespace(NAMESPACE);
        stand.make_node("node-a", 8, 16 << 30, &[]);
        let proxy = stand.proxy();
        let arguments = ["--namespaces", NAMESPACE, "--resync", "20s"];
        let operator = Operator::start(proxy.address, NAMESPACE, &arguments);
        let spec = json!({"model": {"source": {"builtin": {"name": "hearth-demo"}}}});
        stand.make_deployment(NAMESPACE, "demo", &spec);
        let mut fixture = Self {
            operator,
            proxy,
            stand,
        };
        fixture.until("it is settled", is_settled);
        Some(fixture)
    }

    /// Waits until `is_so` holds for the deployment.
    fn until(&mut self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let found = try_wait_until(what, PATIENCE, || {
            let deployment = self.stand.deployment(NAMESPACE, "demo")?;
            is_so(&deployment).then_some(deployment)
        });
        found.unwrap_or_else(|error| {
            let now = self.stand.deployment(NAMESPACE, "demo");
            panic!("{error}: {now:#?}\n{}", self.operator.log())
        })
    }

    /// Does something while the operator is paused.
    fn while_it_stands(&self, work: impl FnOnce(&Cluster)) {
        let send = |signal| {
            let pid = i32::try_from(self.operator.pid()).ok();
            let pid = pid.and_then(Pid::from_raw).expect("a process");
            kill_process(pid, signal).expect("a signal");
        };
        send(Signal::STOP);
        work(self.stand.cluster());
        send(Signal::CONT);
    }

    fn pods(&self) -> BTreeSet<String> {
        let pods = self.stand.cluster().list("pods", NAMESPACE, "");
        let uids = pods.iter().map(|pod| pod["metadata"]["uid"].to_string());
        uids.collect()
    }

    /// Waits until nothing more is written: events follow the status that a test waits for.
    fn wait_until_quiet(&mut self) {
        let mut last = (self.proxy.write_count(), Instant::now());
        let quiet = try_wait_until("nothing more is written", PATIENCE, || {
            let count = self.proxy.write_count();
            if count != last.0 {
                last = (count, Instant::now());
            }
            (last.1.elapsed() > Duration::from_secs(1)).then_some(())
        });
        quiet.unwrap_or_else(|error| panic!("{error}\n{}", self.operator.log()));
    }

    /// Returns the paths of writes in the next seconds.
    fn writes(&self) -> Vec<String> {
        let before = self.proxy.write_count();
        sleep(WATCHED);
        self.writes_since(before)
    }

    /// Returns the paths of writes after the first `before` ones.
    fn writes_since(&self, before: usize) -> Vec<String> {
        let writes = self.proxy.writes().split_off(before);
        let words = |write: &hearth_tests::operator::Write| {
            format!("{} {} {}", write.method, write.path, write.code)
        };
        writes.iter().map(words).collect()
    }
}

fn scaled(stand: &Stand, replicas: u32) {
    let fields = json!({"spec": {"replicas": replicas}});
    stand.patch_deployment(NAMESPACE, "demo", "/scale", &fields);
}

fn message<'a>(deployment: &'a Value, kind: &str) -> &'a str {
    let conditions = deployment["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    let condition = conditions.find(|condition| condition["type"] == kind);
    condition.map_or("", |found| found["message"].as_str().unwrap_or_default())
}

#[test]
fn a_plan_of_a_newer_operator_is_named_and_all_stays_as_it_is() {
    let Some(mut fixture) = Fixture::start_or_skip() else {
        return;
    };
    let pods = fixture.pods();
    assert!(!pods.is_empty());
    // A plan as the next version would leave it.
    let plan = fixture
        .stand
        .cluster()
        .get("inferenceplan", NAMESPACE, "demo-1");
    let mut plan = plan.expect("the plan");
    let old = plan["metadata"].take();
    plan["metadata"] = json!({
        "name": "demo-2", "namespace": NAMESPACE, "labels": old["labels"],
        "annotations": {}, "ownerReferences": old["ownerReferences"],
    });
    plan["spec"]["generation"] = json!(2);
    plan["spec"]["minVersion"] = json!(9);
    fixture.wait_until_quiet();
    let before = fixture.proxy.write_count();
    fixture.stand.cluster().apply(&plan.to_string());

    let is_left = |deployment: &Value| {
        let words = message(deployment, "Degraded");
        condition(deployment, "Ready") == Some("Unknown")
            && condition(deployment, "Degraded") == Some("True")
            && ["demo-2", "minVersion is 9", "delete inferenceplan demo-2"]
                .iter()
                .all(|part| words.contains(part))
    };
    fixture.until("the newer plan is named", is_left);
    fixture.wait_until_quiet();
    let writes = fixture.writes_since(before);
    let of_status = |write: &&String| write.contains("/inferencedeployments/demo/status 200");
    let of_event = |write: &&String| write.contains("/events ");
    assert!(
        writes.iter().filter(of_status).count() == 1
            && writes.iter().filter(of_event).count() <= 1
            && writes.len() <= 2,
        "{writes:?}"
    );
    assert_eq!(fixture.writes(), [""; 0], "it was said already");
    // Neither a changed spec nor a restart of the operator changes anything.
    scaled(&fixture.stand, 2);
    let deployment = fixture.until("the wish is seen", |deployment| {
        let conditions = deployment["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        conditions.any(|c| {
            c["type"] == "Degraded"
                && c["observedGeneration"] == deployment["metadata"]["generation"]
        })
    });
    assert!(is_left(&deployment), "{deployment:#}");
    fixture.operator.restart();
    let writes = fixture.writes();
    let of_deployment = |write: &String| write.contains("/events") || write.contains("/hearth-");
    assert!(writes.iter().all(of_deployment), "{writes:?}");
    assert_eq!(fixture.pods(), pods);
    let told = fixture
        .operator
        .log()
        .matches("of a newer operator")
        .count();
    assert!((1..=2).contains(&told), "said {told} times");

    let delete = ["delete", "inferenceplan", "demo-2", "-n", NAMESPACE];
    fixture.stand.cluster().kubectl(&delete);
    fixture.until("it plans anew", is_settled);
    let plan = fixture
        .stand
        .cluster()
        .get("inferenceplan", NAMESPACE, "demo-2");
    assert_eq!(plan.expect("a plan")["spec"]["minVersion"], Value::Null);
}

#[test]
fn a_secret_that_others_make_anew_is_no_conflict_for_ever() {
    let Some(mut fixture) = Fixture::start_or_skip() else {
        return;
    };
    let cluster = fixture.stand.cluster();
    let mut ours = cluster.get("secret", NAMESPACE, SECRET).expect("a Secret");
    let uid = ours["metadata"]["uid"].take();
    for field in ["resourceVersion", "creationTimestamp", "managedFields"] {
        ours["metadata"][field] = Value::Null;
    }
    // A renewal relies on this: applying with a uid is refused if the Secret is gone or is another one.
    let mut renewal = ours.clone();
    renewal["metadata"]["uid"] = uid;
    let delete = ["delete", "secret", SECRET, "-n", NAMESPACE];
    let theirs = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "stringData": {"tls.crt": "theirs"},
    });
    fixture.while_it_stands(|cluster| {
        cluster.kubectl(&delete);
        let refused = cluster.try_apply(&renewal.to_string()).expect_err("gone");
        assert!(refused.contains("uid"), "{refused}");
        cluster.apply(&theirs.to_string());
        let refused = cluster.try_apply(&renewal.to_string()).expect_err("theirs");
        assert!(refused.contains("uid"), "{refused}");
    });
    fixture.until("somebody else's Secret is named", |deployment| {
        message(deployment, "Degraded").contains("is there already and is not Hearth's")
    });
    let writes = fixture.writes();
    assert!(writes.len() <= 2, "{writes:?}");
    let cluster = fixture.stand.cluster();
    let now = cluster.get("secret", NAMESPACE, SECRET).expect("theirs");
    assert_eq!(now["data"], json!({"tls.crt": "dGhlaXJz"}));

    // A recreated backup of ours is accepted as it is.
    fixture.while_it_stands(|cluster| {
        cluster.kubectl(&delete);
        cluster.apply(&ours.to_string());
    });
    scaled(&fixture.stand, 2);
    fixture.until("it is settled again", is_settled);
    fixture.wait_until_quiet();
    let writes = fixture.writes();
    assert!(writes.is_empty(), "{writes:?}");
}
