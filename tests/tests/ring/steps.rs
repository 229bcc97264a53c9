//! Each member is killed at each step of a short answer: in each part of its prompt, and at each of its tokens.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use hearth_tests::{Answer, RING_MEMBERS, chat_body, chat_stream, has_ended};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::harness::{AGAIN, Alone, Ring, wait_until};

/// Tokens of the answer.
const TOKENS: u32 = 8;
/// Rows of a chunk of the prompt, which is of a few chunks.
const CHUNK_TOKENS: u32 = 16;
/// Parts of the prompt's time in each of which a member is killed.
const PROMPT_PARTS: u32 = 4;

/// Longest time without a token beyond what the member's successor takes to be there. Where other work has the machine just as it
/// joins, that may take longer without any fault of the ring: such a kill is done once more.
const LONGEST_BEYOND_START: Duration = Duration::from_secs(3);
/// Longest such time even then.
const NEVER_BEYOND_START: Duration = Duration::from_secs(10);

/// When a member is killed.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// So long after the question.
    Prompt(Duration),
    /// With this token of the answer.
    Token(usize),
}

/// What one answer was, and when its pieces came.
struct Timed {
    answer: Answer,
    asked: Instant,
    pieces: Vec<Instant>,
}

impl Timed {
    /// The longest time without a piece.
    fn pause(&self) -> Duration {
        let moments = std::iter::once(&self.asked).chain(&self.pieces);
        let pairs = moments.clone().zip(moments.skip(1));
        pairs.map(|(a, b)| *b - *a).max().unwrap_or_default()
    }
}

/// Questions that begin differently: none is a prefix of what was computed before.
fn body(number: usize) -> Value {
    let filler = "The lab has an old server and a laptop. ".repeat(12);
    let question = format!("{number}. {filler}What is Hearth?");
    let mut body = chat_body("hearth-demo", &question, TOKENS);
    body["logit_bias"] = json!({"1": -100});
    body
}

async fn ask(v1: &str, number: usize, mut each: impl FnMut(usize)) -> Timed {
    let asked = Instant::now();
    let mut pieces = Vec::new();
    let body = body(number);
    let answer = chat_stream(v1, &body, |piece, _| {
        pieces.push(Instant::now());
        each(piece);
    });
    let answer = answer.await.unwrap_or_else(|error| panic!("{error:#}"));
    Timed {
        answer,
        asked,
        pieces,
    }
}

/// A ring, and one process that answers the same.
struct Bed {
    ring: Ring,
    alone: Alone,
    /// Questions that were asked.
    asked: usize,
}

/// What a kill of a member costs.
struct Cost {
    /// Pieces of the answer before it.
    pieces: usize,
    /// The longest time without one.
    pause: Duration,
    /// Of that, what is beyond the time until its successor was there.
    beyond: Duration,
}

impl Bed {
    fn start() -> Self {
        let chunked = |plan: &mut Value| {
            for rank in plan["ranks"].as_array_mut().into_iter().flatten() {
                rank["chunkTokens"] = json!(CHUNK_TOKENS);
            }
        };
        Self {
            ring: Ring::start_with(chunked, &[]),
            alone: Alone::start(|_| {}),
            asked: 0,
        }
    }

    /// The number of another question, and what one process answers to it.
    async fn question(&mut self) -> (usize, Timed) {
        let number = self.asked;
        self.asked += 1;
        let v1 = format!("{}/v1", self.alone.gateway.base());
        (number, ask(&v1, number, |_| {}).await)
    }

    /// Time until the first token of the ring's answer to another question, without a kill.
    async fn first_token(&mut self) -> Duration {
        let (number, want) = self.question().await;
        let v1 = format!("{}/v1", self.ring.gateway.base());
        let timed = ask(&v1, number, |_| {}).await;
        assert_eq!(timed.answer, want.answer);
        timed.pieces[0] - timed.asked
    }

    /// Kills a member at a step of the answer to another question, of which no token may differ.
    async fn cost(&mut self, place: usize, step: Step) -> Cost {
        let (number, want) = self.question().await;
        let answer_pieces = want.pieces.len();
        // Bytes of one character may be several tokens, and come as one piece.
        let step = match step {
            Step::Token(at) => Step::Token(at.min(answer_pieces - 1)),
            prompt => prompt,
        };
        let (timed, pieces, restart) = killed(&mut self.ring, number, place, step).await;
        assert_eq!(timed.answer, want.answer, "{place}, {step:?}");
        assert!(
            pieces < answer_pieces,
            "{place}, {step:?}: killed after the answer"
        );
        let pause = timed.pause();
        Cost {
            pieces,
            pause,
            beyond: pause.saturating_sub(restart),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_member_killed_at_each_step_costs_seconds_and_no_token() {
    let mut bed = Bed::start();
    // The first question finds a cold machine.
    bed.first_token().await;
    let prompt = bed.first_token().await;
    println!("undisturbed, the first token comes after {prompt:.2?}");
    let prompts =
        (0..PROMPT_PARTS).map(|part| Step::Prompt(prompt * (2 * part + 1) / (2 * PROMPT_PARTS)));
    let steps: Vec<Step> = prompts
        .chain((1..TOKENS as usize).map(Step::Token))
        .collect();
    let (mut beyond, mut repeated) = (Vec::new(), 0);
    for (place, (_, name, _)) in RING_MEMBERS.iter().enumerate() {
        let mut in_prompt = 0;
        for step in &steps {
            let mut cost = bed.cost(place, *step).await;
            if cost.beyond > LONGEST_BEYOND_START {
                repeated += 1;
                println!(
                    "{name}, {step:?}: {:.2?} beyond its start, so once more",
                    cost.beyond
                );
                assert!(cost.beyond <= NEVER_BEYOND_START, "{name}, {step:?}");
                cost = bed.cost(place, *step).await;
            }
            let Cost {
                pieces,
                pause,
                beyond: more,
            } = cost;
            println!(
                "{name} killed after {pieces} tokens: none for {pause:.2?}, {more:.2?} beyond its start"
            );
            assert!(
                more <= LONGEST_BEYOND_START,
                "{name}, {step:?}: twice too long, {more:.2?} beyond its start"
            );
            in_prompt += usize::from(pieces == 0);
            beyond.push(more);
        }
        assert!(in_prompt > 0, "{name}: never killed while a prompt is read");
    }
    beyond.sort_unstable();
    let (median, longest) = (beyond[beyond.len() / 2], beyond[beyond.len() - 1]);
    println!(
        "{} kills, beyond the start of a member {median:.2?} in the median, {longest:.2?} at most",
        beyond.len()
    );
    assert!(
        repeated * 10 <= beyond.len(),
        "{repeated} of them a second time"
    );
}

/// Kills a member at a step of an answer, and starts it again: also returns after how many pieces that was, and how long its successor
/// took to be there.
async fn killed(
    ring: &mut Ring,
    number: usize,
    place: usize,
    step: Step,
) -> (Timed, usize, Duration) {
    let v1 = format!("{}/v1", ring.gateway.base());
    let joins = |ring: &Ring| ring.members[0].output().matches(AGAIN).count();
    let joins_before = joins(ring);
    let victim = ring.members.remove(place);
    let killed_at: Cell<Option<Instant>> = Cell::new(None);
    let (pieces, pieces_before) = (Cell::new(0), Cell::new(0));
    let kill = || {
        pieces_before.set(pieces.get());
        victim.signal(Signal::KILL);
        killed_at.set(Some(Instant::now()));
    };
    let successor = RefCell::new(None);
    let asked = async {
        let timed = ask(&v1, number, |piece| {
            pieces.set(piece);
            let is_time = match step {
                Step::Token(at) => at == piece,
                // The prompt was read sooner than thought.
                Step::Prompt(_) => killed_at.get().is_none(),
            };
            if is_time {
                kill();
            }
        });
        timed.await
    };
    let restarted = async {
        if let Step::Prompt(after) = step {
            tokio::time::sleep(after).await;
            if killed_at.get().is_none() {
                kill();
            }
        }
        let killed = loop {
            if let Some(at) = killed_at.get() {
                break at;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        // Its port is free once the process is gone.
        let deadline = killed + Duration::from_secs(60);
        while !has_ended(victim.pid()) {
            assert!(Instant::now() < deadline, "{} does not end", victim.name);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let member = ring.process(place, &[]);
        while !member.output().contains("\"event\":\"ready\"") {
            assert!(Instant::now() < deadline, "{}", member.output());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        successor.replace(Some(member));
        killed.elapsed()
    };
    let (timed, restart) = tokio::join!(asked, restarted);
    drop(victim);
    let member = successor.into_inner().expect("it has started");
    ring.members.insert(place, member);
    // The next one is not killed before the ring is complete; a new head serves once it is.
    wait_until("the ring is complete", || {
        place == 0 || joins(ring) > joins_before
    });
    (timed, pieces_before.get(), restart)
}
