//! Peers: prefill processes that read prompts together, with the bits of one, whoever of them dies.

use std::cell::Cell;
use std::time::{Duration, Instant};

use hearth_tests::{Answer, Metrics, Rank, Ranks, chat_body, chat_stream, free_port, has_ended};
use rustix::process::Signal;
use serde_json::{Value, json};

/// The head and its followers.
const MEMBERS: [(&str, &str); 4] = [
    ("prefill", "prefill-0"),
    ("stage", "stage-0"),
    ("stage", "stage-1"),
    ("stage", "stage-2"),
];
/// Tokens of an answer.
const LONG: u32 = 12;
/// Layers of the model.
const LAYERS: u32 = 4;
/// What the head logs when a group that has lost a member has formed anew.
const AGAIN: &str = "complete again";

/// When a member is killed.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Before the question.
    Before,
    /// So long after the question.
    Prompt(Duration),
    /// With the first piece of the answer.
    FirstToken,
}

/// Peers, with the worker that writes the answers to the prompts that they read, and a gateway.
struct Peers {
    ranks: Ranks,
    plan: Value,
    endpoints: Vec<String>,
    members: Vec<Rank>,
    decode: Rank,
    gateway: Rank,
    /// Arguments of each member.
    arguments: Vec<String>,
}

impl Peers {
    /// Starts `count` of them, whose rows come to experts as `experts` says.
    fn start(count: usize, experts: &str) -> Self {
        Self::start_with(count, experts, Vec::new())
    }

    fn start_with(count: usize, experts: &str, arguments: Vec<String>) -> Self {
        Self::planned(count, experts, arguments, |_, _| {})
    }

    /// The same with a change to the rank at each place.
    fn planned(
        count: usize,
        experts: &str,
        arguments: Vec<String>,
        change: impl Fn(usize, &mut Value),
    ) -> Self {
        let ranks = Ranks::of_demo();
        let endpoints: Vec<String> = (0..count)
            .map(|_| format!("127.0.0.1:{}", free_port()))
            .collect();
        let mut plan = ranks.plan_of("prefill", "prefill-0", &endpoints[0]);
        let template = plan["ranks"][0].clone();
        let of = |place: usize| {
            let (role, name) = MEMBERS[place];
            let mut rank = template.clone();
            rank["name"] = json!(name);
            rank["role"] = json!(if role == "prefill" {
                "Prefill"
            } else {
                "Stage"
            });
            rank["index"] = json!(place.saturating_sub(1));
            rank["endpoint"] = json!(endpoints[place]);
            if count > 1 {
                rank["peers"] = json!({
                    "head": "prefill-0", "place": place, "ranks": count, "experts": experts,
                });
            }
            change(place, &mut rank);
            rank
        };
        plan["ranks"] = (0..count).map(of).collect();
        let decode = ranks.start("decode", "decode-0", &[]);
        let mut peers = Self {
            members: Vec::new(),
            gateway: gateway(&ranks),
            ranks,
            plan,
            endpoints,
            decode,
            arguments,
        };
        for place in 0..count {
            let member = peers.process(place);
            peers.members.push(member);
        }
        for member in &mut peers.members {
            member.wait_until_ready();
        }
        peers.decode.wait_until_ready();
        peers.route();
        peers
    }

    fn process(&self, place: usize) -> Rank {
        let (role, name) = MEMBERS[place];
        let place = (role, name, &*self.endpoints[place]);
        self.ranks.start_of(&self.plan, place, &self.arguments, &[])
    }

    /// Waits until the gateway has the head: without a reader, the writer reads prompts itself.
    fn route(&self) {
        self.ranks.route_to(&[&self.members[0], &self.decode]);
        Metrics::wait_for(&self.gateway.metrics_base(), "both are ready", |metrics| {
            ["prefill-0", "decode-0"].iter().all(|name| {
                let label = format!("worker=\"{name}\"");
                metrics.values("hearth_worker_ready", &[&label]) == [1.0]
            })
        });
    }

    async fn ask(&self, number: usize) -> Answer {
        self.answer(&prompt(number, 12 + 5 * number), || {}).await
    }

    /// The answer to a long prompt; `begun` is called with its first piece.
    async fn ask_at_length(&self, number: usize, begun: impl FnOnce()) -> Answer {
        self.answer(&prompt(number, 36), begun).await
    }

    async fn answer(&self, body: &Value, begun: impl FnOnce()) -> Answer {
        let (v1, mut begun) = (format!("{}/v1", self.gateway.base()), Some(begun));
        let each = |_: usize, _: &str| {
            if let Some(begun) = begun.take() {
                begun();
            }
        };
        let answer = chat_stream(&v1, body, each).await;
        answer.unwrap_or_else(|error| panic!("{error:#}: {body}"))
    }

    /// Kills a member at a moment of an answer to a long prompt, and starts it again.
    async fn killed(&mut self, number: usize, place: usize, moment: Moment) -> Answer {
        let victim = self.members.remove(place);
        let is_killed = Cell::new(false);
        let kill = || {
            if !is_killed.replace(true) {
                victim.signal(Signal::KILL);
            }
        };
        // Its successor listens on the same port.
        let gone = async || {
            while !has_ended(victim.pid()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if let Moment::Before = moment {
            kill();
            gone().await;
        }
        // A prompt may be read sooner than thought.
        let asked = self.ask_at_length(number, kill);
        let restarted = async {
            if let Moment::Prompt(after) = moment {
                tokio::time::sleep(after).await;
                kill();
            }
            gone().await;
            self.process(place)
        };
        let (got, member) = tokio::join!(asked, restarted);
        self.members.insert(place, member);
        got
    }

    /// Waits until the head has reported prompt tokens that it has read, with the others.
    fn wait_until_read(&self) {
        Metrics::wait_for(
            &self.gateway.metrics_base(),
            "prompts are read",
            |metrics| metrics.of_role("hearth_worker_prompt_tokens_total", "prefill") > 0.0,
        );
    }

    /// Waits until the head has reported that keys and values came to all in this way. Passed on, its own go to the other one of its
    /// node and to one elsewhere, and it hands those of one elsewhere on: two pieces to one.
    fn wait_until_kv_went(&self, kv: &str) {
        let what = format!("keys and values went: {kv}");
        Metrics::wait_for(&self.gateway.metrics_base(), &what, |metrics| {
            let of_head = |name: &str| metrics.of_rank(name, MEMBERS[0].1);
            let own = of_head("hearth_worker_peer_kv_bytes_total");
            let passed_on = of_head("hearth_worker_peer_kv_passed_on_bytes_total");
            own > 0.0
                && match kv {
                    "PassedOn" => (1.5..2.5).contains(&(own / passed_on)),
                    _ => passed_on == 0.0,
                }
        });
    }
}

fn gateway(ranks: &Ranks) -> Rank {
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    gateway
}

/// A prompt of its own for each number, of so many sentences, with log probabilities that show its bits. From 12 on a prefill
/// worker reads it.
fn prompt(number: usize, sentences: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(sentences);
    chat_body(
        "hearth-demo",
        &format!("{number}. {filler}What is Hearth?"),
        LONG,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_read_prompts_with_the_bits_of_one() {
    let one = Peers::start(1, "SmallEp");
    let mut want = Vec::new();
    for number in 0..3 {
        want.push(one.ask(number).await);
    }
    drop(one);
    for (count, experts, kv) in [
        (2, "SmallEp", "Direct"),
        (3, "Ep", "Direct"),
        (4, "SmallEp", "Direct"),
        (4, "Ep", "PassedOn"),
    ] {
        // Two on each of two nodes, as far as keys and values are concerned.
        let passes_on = |place: usize, rank: &mut Value| {
            if kv == "PassedOn" {
                rank["node"] = json!(["attic", "cellar"][place / 2]);
                rank["peers"]["kv"] = json!(kv);
            }
        };
        let peers = Peers::planned(count, experts, Vec::new(), passes_on);
        for (number, want) in want.iter().enumerate() {
            let got = peers.ask(number).await;
            assert_eq!(got, *want, "{count} by {experts}, {kv}");
        }
        peers.wait_until_read();
        let head = &peers.members[0];
        assert!(
            head.output().contains("a group has formed"),
            "{}",
            head.output()
        );
        peers.wait_until_kv_went(kv);
    }
}

/// Of a prompt's time until the first token, each layer has about the same part.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_dies_at_any_moment_costs_no_answer() {
    use Moment::{Before, FirstToken, Prompt};
    // Slow enough to be met in the middle of a prompt.
    let slow = || vec!["--isa".to_owned(), "scalar".to_owned()];
    const KILLS: usize = 8;
    let one = Peers::start_with(1, "SmallEp", slow());
    let mut want = Vec::new();
    for number in 0..=KILLS + 1 {
        want.push(one.ask_at_length(number, || {}).await);
    }
    drop(one);
    let mut peers = Peers::start_with(2, "SmallEp", slow());
    // The first one reads the weights, too.
    assert_eq!(peers.ask_at_length(KILLS + 1, || {}).await, want[KILLS + 1]);
    let (asked, first_after) = (Instant::now(), Cell::new(Duration::ZERO));
    let begun = || first_after.set(asked.elapsed());
    assert_eq!(peers.ask_at_length(0, begun).await, want[0]);
    let prompt = first_after.get();
    let in_layer = |layer: u32| Prompt(prompt * (2 * layer + 1) / (2 * LAYERS));
    let last = in_layer(LAYERS - 1);
    let kills: [(usize, Moment); KILLS] = [
        (1, Before),
        (1, in_layer(0)),
        (0, in_layer(1)),
        (1, in_layer(2)),
        (0, last),
        (1, last),
        (1, FirstToken),
        (0, FirstToken),
    ];
    let mut in_prompts = 0;
    for (number, (place, moment)) in (1..).zip(kills) {
        let name = MEMBERS[place].1;
        let (begun, lost_before) = (Instant::now(), lost(&peers.members[0]));
        let joins_before = joins(&peers.members[0]);
        let got = peers.killed(number, place, moment).await;
        println!(
            "{name} was killed, {moment:?}, and the answer took {:?}",
            begun.elapsed()
        );
        assert_eq!(got, want[number], "{name}, {moment:?}");
        peers.members[place].wait_until_ready();
        // The next one is killed in a group that is complete; a new head serves once its group is.
        let deadline = Instant::now() + Duration::from_secs(60);
        while place > 0 && joins(&peers.members[0]) == joins_before {
            let head = &peers.members[0];
            assert!(Instant::now() < deadline, "{}", head.output());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if place > 0 {
            in_prompts += lost(&peers.members[0]) - lost_before;
        }
        peers.route();
    }
    assert!(in_prompts > 1, "{in_prompts} passes have lost a peer");
}

/// The head reads on, and finds the successor when the next prompt comes.
#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_told_to_end_alone_finishes_its_pass_and_makes_room() {
    let one = Peers::start(1, "SmallEp");
    let want = one.ask(9).await;
    drop(one);
    let mut peers = Peers::start(2, "SmallEp");
    let mut leaver = peers.members.remove(1);
    leaver.signal(Signal::TERM);
    let told = Instant::now();
    // The head has no less to do than before.
    while told.elapsed() < Duration::from_secs(4) {
        assert_eq!(peers.ask(9).await, want);
    }
    assert!(leaver.wait().success(), "{}", leaver.output());
    assert!(
        told.elapsed() < Duration::from_secs(15),
        "{:?}",
        told.elapsed()
    );
    assert_eq!(lost(&peers.members[0]), 0, "no pass was lost");
    let successor = peers.process(1);
    peers.members.push(successor);
    peers.members[1].wait_until_ready();
    assert_eq!(peers.ask(9).await, want);
}

/// How often a head's group was complete again.
fn joins(head: &Rank) -> usize {
    head.output().matches(AGAIN).count()
}

/// How often a head has lost a member while it was reading a prompt.
fn lost(head: &Rank) -> usize {
    let output = head.output();
    let lines = output.lines().filter(|line| line.contains("not complete"));
    lines.filter(|line| line.contains("requests=1")).count()
}
