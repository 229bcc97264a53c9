//! Ready as clients experience it while the operator dies after each of its writes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_tests::cluster::{Cluster, Options, condition, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::release::{self, PATIENCE, SYSTEM, infd, patch, pods, wait_until_settled};
use super::{OPTIONS, demo, ledger};

/// Path of the deployment.
const PATH: &str = "/apis/hearth.dev/v1alpha1/namespaces/default/inferencedeployments/demo";
/// Longest time for an answer while Pods start on both CPUs.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// Pause between looks, to leave the machine to the workload.
const PAUSE: Duration = Duration::from_millis(30);
/// Pause between looks at the audit log: the operator dies before its next write, or soon after.
const HASTE: Duration = Duration::from_millis(1);
/// Looks at a deployment that has reached its end state.
const LOOKS_AT_THE_END: usize = 10;
/// More than the sequential writes of any change; repeated writes fail here.
const MOST_DEATHS: usize = 40;
/// CPU request of an operator on the node where the next one starts.
const OPERATOR_MILLIS: u64 = 50;

/// A change next to the running plan, one that must make room first, and another number of workers: whenever the
/// deployment reports Ready a client is answered, and according to the current spec if it reports that nothing is in
/// progress. The context length identifies the generation that answers.
#[test]
fn ready_is_true_whenever_the_operator_dies() {
    let options = Options {
        audit: true,
        ..OPTIONS
    };
    let Some(cluster) = &Cluster::start_or_skip(&options) else {
        return;
    };
    let images = cluster.import_hearth();
    cluster.import_toolbox();
    release::install(cluster, &images, 1);
    cluster.apply(&demo().to_string());
    wait_until_settled(cluster, "demo");
    let reach = cluster.reach("default", "demo", 80);
    let prober = Prober::start(cluster, reach.v1());
    let mut reaper = Reaper {
        cluster,
        prober: &prober,
        offset: 0,
        alive: Vec::new(),
    };
    let changed_to = |tokens: u32| {
        let model = json!({"model": {"contextLength": tokens}});
        move || patch(cluster, "demo", &model)
    };
    let beside = reaper.reap("a change beside what runs", changed_to(1024));
    beside.assert(4, 4);

    let gateway = &pods(cluster, "demo", "gateway")[0]["spec"];
    let needed = ledger::millis(&gateway["containers"][0]["resources"]["requests"]["cpu"]);
    for node in ["node-1", "node-2"] {
        let is_its_node = gateway["nodeName"] == node;
        let room = if is_its_node { needed } else { 0 };
        ledger::occupy_all_but(
            cluster,
            node,
            room + ledger::RESERVE_MILLIS + OPERATOR_MILLIS,
        );
    }
    let back = reaper.reap("one that makes room first", changed_to(2048));
    back.assert(4, 1);
    // It is not Ready without workers.
    assert!(back.ready_deaths < back.deaths, "{back:?}");
    for node in ["node-1", "node-2"] {
        ledger::leave(cluster, node);
    }

    let scale = || {
        cluster.kubectl(&["scale", "infd/demo", "--replicas=2"]);
    };
    reaper.reap("another number of workers", scale).assert(2, 2);
    prober.finish();
}

/// Kills the operator repeatedly.
struct Reaper<'a> {
    cluster: &'a Cluster,
    prober: &'a Prober,
    /// Offset up to which the audit log was read.
    offset: u64,
    /// The operator's processes once they run, found before the next write so that the kill is immediate.
    alive: Vec<u32>,
}

/// Results of one change.
#[derive(Debug)]
struct Toll {
    deaths: usize,
    /// Deaths after which the deployment reported Ready, and answered without an operator.
    ready_deaths: usize,
}

impl Toll {
    fn assert(&self, deaths: usize, ready_deaths: usize) {
        assert!(
            self.deaths >= deaths && self.ready_deaths >= ready_deaths,
            "too few to mean anything: {self:?}"
        );
    }
}

impl Reaper<'_> {
    /// Makes a change and kills the operator after its next write, repeatedly, at most [`MOST_DEATHS`] times; then
    /// waits until the change is complete, and some looks longer.
    fn reap(&mut self, what: &str, change: impl FnOnce()) -> Toll {
        let began = Instant::now();
        let before = self.prober.tally().ready;
        self.has_written();
        self.alive.clear();
        change();
        let generation = infd(self.cluster, "demo")["metadata"]["generation"].as_u64();
        let generation = generation.expect("a generation");
        let (mut deaths, mut ready_deaths) = (0, 0);
        for _ in 0..MOST_DEATHS {
            if !self.writes_before_the_end_of(generation) {
                break;
            }
            if self.kill() {
                deaths += 1;
                ready_deaths += usize::from(self.is_ready_without_operator());
                self.let_another_lead();
            }
        }
        wait_until(&format!("{what} has come to its end"), 2 * PATIENCE, || {
            let looks = self.prober.looks_at_the_end_of(generation);
            (looks >= LOOKS_AT_THE_END).then_some(())
        });
        let ready = self.prober.tally().ready - before;
        println!(
            "{what}: {deaths} deaths, {ready_deaths} of them while Ready; {ready} times Ready and answered, in {:.0} s",
            began.elapsed().as_secs_f64()
        );
        Toll {
            deaths,
            ready_deaths,
        }
    }

    /// Whether the operator has written anything about deployments since the last call.
    fn has_written(&mut self) -> bool {
        let entries = self.cluster.audit_log_from(&mut self.offset);
        entries.iter().any(|entry| {
            entry.user.contains(":hearth-operator")
                && entry.namespace == "default"
                && entry.resource != "events"
        })
    }

    /// Waits for its next write; `false` if the change is complete without any.
    fn writes_before_the_end_of(&mut self, generation: u64) -> bool {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if self.has_written() {
                return true;
            }
            if self.alive.is_empty() {
                // SIGCONT has no effect on a running process.
                let nodes = [1, 2].map(|index| self.cluster.node(index));
                let alive = nodes.map(|node| node.signal_process("hearth operator", Signal::CONT));
                self.alive = alive.concat();
            }
            if self.prober.looks_at_the_end_of(generation) > 0 {
                return false;
            }
            assert!(
                Instant::now() < deadline,
                "nothing is written, and nothing has come to its end: {:#}",
                infd(self.cluster, "demo")
            );
            std::thread::sleep(HASTE);
        }
    }

    /// Kills the operator and its Pod at once; `false` if it was not leading, and the write seen was an earlier
    /// operator's that the API server processed late. Its Lease stays, and holds off the next one for longer than any
    /// answer is waited for.
    fn kill(&mut self) -> bool {
        // From here on it does nothing, and its container is not restarted before its Pod is gone.
        let stopped = std::mem::take(&mut self.alive);
        stopped.iter().for_each(|&pid| send(pid, Signal::STOP));
        if stopped.is_empty() {
            return false;
        }
        let longer = json!({"spec": {"leaseDurationSeconds": 600}}).to_string();
        let arguments = [
            "patch",
            "lease",
            "hearth-operator",
            "--type=merge",
            "--patch",
        ];
        let arguments = [&arguments[..], &[&longer, "--namespace", SYSTEM]].concat();
        let has_led = self.cluster.try_kubectl(&arguments).is_ok();
        let selector = "--selector=app.kubernetes.io/component=operator";
        let arguments = ["delete", "pods", selector, "--grace-period=0", "--force"];
        self.in_its_namespace(&arguments);
        stopped.iter().for_each(|&pid| send(pid, Signal::KILL));
        // Otherwise it would be taken for the next one, which would then end by itself and give its Lease back.
        wait_until("the operator's processes are gone", PATIENCE, || {
            let is_gone = |&pid: &u32| !Path::new(&format!("/proc/{pid}")).exists();
            stopped.iter().all(is_gone).then_some(())
        });
        has_led
    }

    /// Waits until the deployment has been looked at since the operator's death; returns whether it was Ready.
    fn is_ready_without_operator(&self) -> bool {
        let before = self.prober.tally();
        let (looks, ready) = (before.looks, before.ready);
        drop(before);
        // The first look may have begun before.
        wait_until("the deployment is looked at", PATIENCE, || {
            (self.prober.tally().looks >= looks + 2).then_some(())
        });
        self.prober.tally().ready > ready
    }

    /// Deletes the dead operator's Lease, which has the same effect as its expiry.
    fn let_another_lead(&mut self) {
        let arguments = ["delete", "lease", "hearth-operator", "--ignore-not-found"];
        self.has_written();
        self.in_its_namespace(&arguments);
    }

    fn in_its_namespace(&self, arguments: &[&str]) {
        self.cluster
            .kubectl(&[arguments, &["--namespace", SYSTEM]].concat());
    }
}

/// Sends a signal to a process; one that is gone is not an error.
fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _ = kill_process(pid, signal);
    }
}

/// A client that continuously looks at the deployment, and requests an answer whenever it reports Ready.
struct Prober {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    thread: Option<JoinHandle<()>>,
}

/// Observations of the client.
#[derive(Debug, Default)]
struct Tally {
    /// Looks at a deployment that was unchanged before and after.
    looks: usize,
    /// Looks of these at a Ready deployment.
    ready: usize,
    /// Looks of these at a deployment whose spec runs with nothing in progress, by the spec's generation.
    current: BTreeMap<u64, usize>,
    /// Longest wait for an answer.
    slowest: Duration,
    /// Wrong answers.
    wrong: Vec<String>,
}

impl Prober {
    fn start(cluster: &Cluster, v1: String) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("runtime");
        let api = runtime.block_on(cluster.client());
        // A new connection each time, like another client's.
        let http = reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .timeout(ANSWER_TIMEOUT)
            .build()
            .expect("a client");
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let looker = Looker {
            api,
            http,
            v1,
            tally: Arc::clone(&tally),
        };
        let thread = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || runtime.block_on(looker.run(&stop))
        });
        Self {
            stop,
            tally,
            thread: Some(thread),
        }
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        lock(&self.tally)
    }

    /// Returns how many times the spec's generation was found running, with nothing in progress.
    fn looks_at_the_end_of(&self, generation: u64) -> usize {
        let tally = self.tally();
        assert!(tally.wrong.is_empty(), "{:#?}", tally.wrong);
        tally.current.get(&generation).copied().unwrap_or(0)
    }

    /// Stops, and asserts that it answered whenever it reported Ready.
    fn finish(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the prober");
        }
        let tally = self.tally();
        println!(
            "{} looks, at Ready {}, at the end of a change {:?}; the slowest answer took {:.1?}",
            tally.looks, tally.ready, tally.current, tally.slowest
        );
        assert!(tally.wrong.is_empty(), "{:#?}", tally.wrong);
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn lock(tally: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Looker {
    api: kube::Client,
    http: reqwest::Client,
    v1: String,
    tally: Arc<Mutex<Tally>>,
}

impl Looker {
    async fn run(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            if let Err(error) = self.look().await {
                lock(&self.tally).wrong.push(error);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Looks once: an answer counts if the deployment was unchanged before and after it.
    async fn look(&self) -> Result<(), String> {
        let before = self.read().await?;
        if condition(&before, "Ready") != Some("True") {
            lock(&self.tally).looks += 1;
            return Ok(());
        }
        let began = Instant::now();
        let told = self.ask().await;
        let waited = began.elapsed();
        let after = self.read().await?;
        if after["metadata"]["resourceVersion"] != before["metadata"]["resourceVersion"] {
            return Ok(());
        }
        let generation = &before["metadata"]["generation"];
        let is_current = before["status"]["observedGeneration"] == *generation
            && condition(&before, "Progressing") == Some("False");
        let mut tally = lock(&self.tally);
        tally.looks += 1;
        tally.ready += 1;
        tally.slowest = tally.slowest.max(waited);
        if is_current {
            let generation = generation.as_u64().unwrap_or_default();
            *tally.current.entry(generation).or_default() += 1;
        }
        let context = told.map_err(|error| {
            let status = &before["status"];
            format!("says Ready, and after {waited:.1?} {error}: {status}")
        })?;
        let asked = &before["spec"]["model"]["contextLength"];
        if is_current && context != *asked {
            return Err(format!(
                "says that its spec runs, which asks for a context of {asked}; who answers has {context}: {}",
                before["status"]
            ));
        }
        Ok(())
    }

    /// Reads the deployment, with a retry if the API server does not answer.
    async fn read(&self) -> Result<Value, String> {
        let mut tries = 0;
        let text = loop {
            let request = http::Request::get(PATH).body(Vec::new());
            let request = request.map_err(|error| error.to_string())?;
            tries += 1;
            match self.api.request_text(request).await {
                Ok(text) => break text,
                Err(error) if tries == 5 => return Err(format!("{PATH}: {error}")),
                Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
            }
        };
        serde_json::from_str(&text).map_err(|error| format!("{error} in {text}"))
    }

    /// Requests one token, then the context length.
    async fn ask(&self) -> Result<Value, String> {
        let body = json!({"model": "hearth-demo", "prompt": "Hello", "max_tokens": 1});
        let request = self.http.post(format!("{}/completions", self.v1));
        answer(request.json(&body)).await?;
        let models = answer(self.http.get(format!("{}/models", self.v1))).await?;
        Ok(models["data"][0]["max_model_len"].clone())
    }
}

/// Returns the body of a 200 response.
async fn answer(request: reqwest::RequestBuilder) -> Result<Value, String> {
    let response = request.send().await;
    let response = response.map_err(|error| format!("nobody answers: {error:?}"))?;
    let status = response.status();
    let text = response.text().await;
    let text = text.map_err(|error| format!("the answer breaks off: {error:?}"))?;
    match status.as_u16() {
        200 => serde_json::from_str(&text).map_err(|error| format!("{error} in {text}")),
        code => Err(format!("the answer is {code}: {text}")),
    }
}
