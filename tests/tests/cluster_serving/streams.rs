//! Clients that never stop asking, so that changes happen during streams.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_tests::{chat_body, chat_stream, root};
use serde_json::Value;

/// Concurrent streams.
pub(crate) const STREAMS: usize = 8;
const MOST_TOKENS: u32 = 200;
/// A long prompt takes about 1,500 of the demo model's 2,048 tokens; its answer is short.
const LONG_PROMPT_QUESTIONS: usize = 120;
const LONG_PROMPT_ANSWER_TOKENS: u32 = 8;
/// Long prompts that are asked once more at the end.
const ASKED_AGAIN: usize = 4;

/// A question with the demo model's own answer, from transformers on the same weights.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) question: String,
    pub(crate) answer: String,
}

/// Returns questions whose answers are long enough to be in mid-stream when something happens.
pub(crate) fn known() -> Vec<Known> {
    let path = root().join("models/training/transformers_answers.jsonl");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let known = text.lines().map(|line| {
        let line: Value = serde_json::from_str(line).expect("a JSON line");
        let field = |name: &str| line[name].as_str().expect("a text").to_owned();
        Known {
            question: field("question"),
            answer: field("answer"),
        }
    });
    known.filter(|known| known.answer.len() > 120).collect()
}

/// Running clients.
pub(crate) struct Streams {
    stop: Arc<AtomicBool>,
    tally: Arc<Mutex<Tally>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Tally {
    right: usize,
    wrong: Vec<String>,
    /// Long prompts with their answers.
    long: Vec<Known>,
}

/// What clients ask.
#[derive(Clone, Copy)]
enum Ask {
    /// Questions with known answers.
    Questions,
    /// Prompts of which none begins as another does: each is read in full. The last must get the same answers once more.
    LongPrompts,
}

impl Streams {
    /// Starts [`STREAMS`] clients that ask `v1` one question after another.
    pub(crate) fn start(v1: &str) -> Self {
        Self::start_many(v1, STREAMS)
    }

    /// Starts that many clients.
    pub(crate) fn start_many(v1: &str, clients: usize) -> Self {
        Self::start_asking(v1, clients, Ask::Questions)
    }

    /// Starts that many clients that ask with long prompts.
    pub(crate) fn start_long_prompts(v1: &str, clients: usize) -> Self {
        Self::start_asking(v1, clients, Ask::LongPrompts)
    }

    fn start_asking(v1: &str, clients: usize, what: Ask) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tally = Arc::new(Mutex::new(Tally::default()));
        let thread = std::thread::spawn({
            let (v1, stop, tally) = (v1.to_owned(), stop.clone(), tally.clone());
            move || run(&v1, clients, what, &stop, &tally)
        });
        Self {
            stop,
            tally,
            thread: Some(thread),
        }
    }

    /// Returns the number of complete, correct answers so far.
    pub(crate) fn right(&self) -> usize {
        lock(&self.tally).right
    }

    /// Waits for `more` further answers.
    pub(crate) fn wait_for(&self, more: usize) {
        let goal = self.right() + more;
        hearth_tests::cluster::wait_until("streams go on", Duration::from_secs(150), || {
            (self.right() >= goal).then_some(())
        });
    }

    /// Lets streams in flight end, and asserts that every answer was complete and correct.
    pub(crate) fn finish(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("clients");
        }
        let tally = lock(&self.tally);
        assert!(
            tally.wrong.is_empty(),
            "{} of {} streams failed: {:#?}",
            tally.wrong.len(),
            tally.wrong.len() + tally.right,
            &tally.wrong[..tally.wrong.len().min(5)]
        );
        tally.right
    }
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(v1: &str, clients: usize, what: Ask, stop: &AtomicBool, tally: &Mutex<Tally>) {
    let known = known();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("runtime");
    runtime.block_on(async {
        let asking = (0..clients).map(|first| {
            let known = &known;
            async move {
                let mut turn = first;
                while !stop.load(Ordering::Relaxed) {
                    let question = &known[turn % known.len()];
                    match what {
                        Ask::Questions => ask(v1, question, MOST_TOKENS, tally).await,
                        Ask::LongPrompts => ask_long(v1, long_prompt(known, turn), tally).await,
                    }
                    turn += clients;
                }
            }
        });
        futures::future::join_all(asking).await;
        let long = std::mem::take(&mut lock(tally).long);
        for known in long.iter().rev().take(ASKED_AGAIN) {
            ask(v1, known, LONG_PROMPT_ANSWER_TOKENS, tally).await;
        }
    });
}

/// Returns the `n`th of endless long prompts.
fn long_prompt(known: &[Known], n: usize) -> String {
    let questions = known.iter().cycle().skip(n % known.len());
    let texts: Vec<&str> = questions
        .take(LONG_PROMPT_QUESTIONS)
        .map(|it| it.question.as_str())
        .collect();
    format!("{n}. {}", texts.join(" "))
}

async fn ask(v1: &str, known: &Known, most_tokens: u32, tally: &Mutex<Tally>) {
    let Known { question, answer } = known;
    let body = chat_body("hearth-demo", question, most_tokens);
    let got = chat_stream(v1, &body, |_, _| {}).await;
    let mut tally = lock(tally);
    match got {
        Ok(got) if got.text.trim() == answer => tally.right += 1,
        Ok(got) => tally
            .wrong
            .push(format!("{question}: {:?} in place of {answer:?}", got.text)),
        Err(error) => tally.wrong.push(format!("{question}: {error:#}")),
    }
}

async fn ask_long(v1: &str, question: String, tally: &Mutex<Tally>) {
    let body = chat_body("hearth-demo", &question, LONG_PROMPT_ANSWER_TOKENS);
    let got = chat_stream(v1, &body, |_, _| {}).await;
    let mut tally = lock(tally);
    match got {
        Ok(got) => {
            tally.right += 1;
            let answer = got.text.trim().to_owned();
            tally.long.push(Known { question, answer });
        }
        Err(error) => tally.wrong.push(format!("{question}: {error:#}")),
    }
}
