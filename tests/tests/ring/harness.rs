//! A ring with its gateway, and questions to it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::future::join_all;
use hearth_tests::{
    Answer, RING_MEMBERS, Rank, Ranks, RingMember, chat_body, chat_stream, free_port, root, run,
    worker,
};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Tokens of an answer.
pub(crate) const LONG: u32 = 96;
/// What the head logs when a ring that has lost a member has formed anew.
pub(crate) const AGAIN: &str = "complete again";
/// Longest time until something happens; a busy machine with an unoptimised build needs some.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A ring with its gateway.
pub(crate) struct Ring {
    pub(crate) plan: Value,
    pub(crate) endpoints: Vec<String>,
    pub(crate) members: Vec<Rank>,
    /// What the plan says of each member.
    planned: &'static [RingMember],
    /// Of every member.
    arguments: Vec<String>,
    pub(crate) gateway: Rank,
    /// With the members' logs, which they print as they are dropped where a test fails.
    pub(crate) ranks: Ranks,
}

impl Ring {
    pub(crate) fn start() -> Self {
        Self::start_with(|_| {}, &[])
    }

    /// A ring whose plan is changed by `edit` before any member starts, each with these arguments.
    pub(crate) fn start_with(edit: impl FnOnce(&mut Value), arguments: &[&str]) -> Self {
        Self::planned(edit, arguments).started()
    }

    /// A ring of other members than [`RING_MEMBERS`].
    pub(crate) fn start_of(planned: &'static [RingMember], edit: impl FnOnce(&mut Value)) -> Self {
        Self::of(planned, edit, &[]).started()
    }

    fn started(mut self) -> Self {
        for place in 0..self.planned.len() {
            let member = self.process(place, &[]);
            self.members.push(member);
        }
        for member in &mut self.members {
            member.wait_until_ready();
        }
        self.ranks.route_to(&[&self.members[0]]);
        self
    }

    /// A ring of which no member has started.
    pub(crate) fn planned(edit: impl FnOnce(&mut Value), arguments: &[&str]) -> Self {
        Self::of(&RING_MEMBERS, edit, arguments)
    }

    fn of(
        planned: &'static [RingMember],
        edit: impl FnOnce(&mut Value),
        arguments: &[&str],
    ) -> Self {
        let mut ranks = Ranks::of_demo();
        let addresses = planned.iter().map(|_| format!("127.0.0.1:{}", free_port()));
        let endpoints: Vec<String> = addresses.collect();
        let mut plan = ranks.ring_plan_of(planned, &endpoints);
        edit(&mut plan);
        ranks.edit(|of_gateway| of_gateway["model"] = plan["model"].clone());
        let gateway = gateway(&ranks);
        Self {
            members: Vec::new(),
            planned,
            ranks,
            plan,
            endpoints,
            arguments: arguments.iter().map(|text| (*text).to_owned()).collect(),
            gateway,
        }
    }

    /// The process of a member, with some more arguments.
    pub(crate) fn process(&self, place: usize, more: &[&str]) -> Rank {
        let (role, name, _) = self.planned[place];
        let place = (role, name, &*self.endpoints[place]);
        let more = more.iter().map(|text| (*text).to_owned());
        let arguments: Vec<String> = self.arguments.iter().cloned().chain(more).collect();
        self.ranks.start_of(&self.plan, place, &arguments, &[])
    }

    /// Kills a member, whose successor is to listen on the same port.
    pub(crate) fn kill(&mut self, place: usize) {
        self.members[place].signal(Signal::KILL);
        self.members[place].wait();
    }
}

pub(crate) fn gateway(ranks: &Ranks) -> Rank {
    let routes = ranks.routes().display().to_string();
    let gateway = ranks.start("gateway", "gateway-0", &["--routes".to_owned(), routes]);
    gateway.wait_for_metrics();
    gateway
}

/// A request of its own for each number: greedy or sampled, short or of several flights.
pub(crate) fn body(number: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(number * 7 % 15);
    let mut body = chat_body(
        "hearth-demo",
        &format!("{filler}What is Hearth? {number}"),
        LONG,
    );
    body["logit_bias"] = json!({"1": -100});
    if number % 2 == 1 {
        body["temperature"] = json!(1.1);
        body["seed"] = json!(number);
    }
    body
}

pub(crate) async fn answers(gateway: &Rank, numbers: std::ops::Range<usize>) -> Vec<Answer> {
    answers_that_begin(gateway, numbers, |_| {}).await
}

/// Answers to some requests; `begun` is called with the number of each as its text begins.
pub(crate) async fn answers_that_begin(
    gateway: &Rank,
    numbers: std::ops::Range<usize>,
    begun: impl Fn(usize),
) -> Vec<Answer> {
    let v1 = format!("{}/v1", gateway.base());
    streams(&v1, numbers, begun).await
}

pub(crate) async fn streams(
    v1: &str,
    numbers: std::ops::Range<usize>,
    begun: impl Fn(usize),
) -> Vec<Answer> {
    let ask = async |number| {
        let each = |pieces, _: &str| {
            if pieces == 1 {
                begun(number);
            }
        };
        let answer = chat_stream(v1, &body(number), each).await;
        answer.unwrap_or_else(|error| panic!("{number}: {error:#}"))
    };
    join_all(numbers.map(ask)).await
}

/// What one process that has all layers answers.
pub(crate) async fn expected(numbers: std::ops::Range<usize>) -> Vec<Answer> {
    expected_of(|_| {}, numbers).await
}

/// The same with another plan.
pub(crate) async fn expected_of(
    edit: impl FnOnce(&mut Value),
    numbers: std::ops::Range<usize>,
) -> Vec<Answer> {
    answers(&Alone::start(edit).gateway, numbers).await
}

/// One process that has all layers, with its gateway.
pub(crate) struct Alone {
    pub(crate) gateway: Rank,
    _decode: Rank,
    _ranks: Ranks,
}

impl Alone {
    pub(crate) fn start(edit: impl FnOnce(&mut Value)) -> Self {
        let mut ranks = Ranks::of_demo();
        ranks.edit(edit);
        let mut decode = ranks.start("decode", "decode-0", &[]);
        decode.wait_until_ready();
        let gateway = gateway(&ranks);
        ranks.route_to(&[&decode]);
        Self {
            gateway,
            _decode: decode,
            _ranks: ranks,
        }
    }
}

/// A random Qwen3 of as many layers as the demo has, with its tokenizer.
pub(crate) fn dense_model(directory: &Path) -> PathBuf {
    dense_model_of(4, directory)
}

/// The same of so many layers.
pub(crate) fn dense_model_of(layers: u32, directory: &Path) -> PathBuf {
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 1, "rope_theta": 10000.0,
        "attention_bias": false,
    });
    let (file, model) = (directory.join("config.json"), directory.join("model"));
    std::fs::write(&file, config.to_string()).expect("a file");
    let mut make = worker();
    make.args(["random", "--dtype", "bf16", "--config"])
        .arg(file);
    let (code, _, said) = run(make.arg("--out").arg(&model));
    assert_eq!(code, 0, "{said}");
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        let from = root().join("models/hearth-demo").join(file);
        std::fs::copy(from, model.join(file)).expect("a copy");
    }
    model
}

pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
