//! Quality of the demo model's answers through the endpoint, compared with transformers on the same weights (Hearth's
//! counterpart of Table 2 in the hybrid MoE paper: the engine costs no quality).

use futures::StreamExt;
use hearth_tests::{Up, chat_body, chat_stream, root};
use serde_json::Value;

/// Lowest allowed share of exact answers, greedy.
const LEAST_EXACT: f64 = 0.95;
/// Largest allowed difference between Hearth and transformers.
const FARTHEST: f64 = 0.01;
/// Questions asked concurrently: batching must not change an answer.
const CONCURRENT: usize = 8;

struct Reference {
    question: String,
    expected: String,
    answer: String,
}

fn references() -> Vec<Reference> {
    let path = root().join("models/training/transformers_answers.jsonl");
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let field = |line: &Value, name: &str| {
        line[name]
            .as_str()
            .unwrap_or_else(|| panic!("no {name} in {line}"))
            .to_owned()
    };
    text.lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON line"))
        .map(|line| Reference {
            question: field(&line, "question"),
            expected: field(&line, "expected"),
            answer: field(&line, "answer"),
        })
        .collect()
}

#[tokio::test]
async fn greedy_answers_are_exact_and_those_of_transformers() {
    let references = references();
    assert!(
        references.len() >= 300,
        "only {} questions",
        references.len()
    );
    let up = Up::demo();
    let v1 = up.v1();
    let answers: Vec<String> = futures::stream::iter(&references)
        .map(|reference| {
            let v1 = &v1;
            async move {
                let body = chat_body("hearth-demo", &reference.question, 200);
                chat_stream(v1, &body, |_, _| {})
                    .await
                    .expect("answer")
                    .text
                    .trim()
                    .to_owned()
            }
        })
        .buffered(CONCURRENT)
        .collect()
        .await;

    let total = references.len() as f64;
    let share = |count: usize| count as f64 / total;
    let pairs = || references.iter().zip(&answers);
    let ours = share(
        pairs()
            .filter(|(reference, answer)| reference.expected.trim() == **answer)
            .count(),
    );
    let theirs = share(
        references
            .iter()
            .filter(|reference| reference.expected.trim() == reference.answer.trim())
            .count(),
    );
    let same = share(
        pairs()
            .filter(|(reference, answer)| reference.answer.trim() == **answer)
            .count(),
    );
    println!(
        "exact match over {total} questions: Hearth {:.2} %, transformers {:.2} %, same answer {:.2} %",
        ours * 100.0,
        theirs * 100.0,
        same * 100.0
    );
    for (reference, answer) in pairs()
        .filter(|(reference, answer)| reference.answer.trim() != **answer)
        .take(5)
    {
        println!(
            "differs: {}\n  transformers: {}\n  Hearth:       {answer}",
            reference.question, reference.answer
        );
    }
    assert!(ours >= LEAST_EXACT, "exact match {ours}");
    assert!(
        (ours - theirs).abs() <= FARTHEST,
        "Hearth {ours}, transformers {theirs}"
    );
}
