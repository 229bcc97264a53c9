//! Checks of JSON schemas before a worker sees them, so that an invalid one is a 400 at once, and one that would bring
//! down a worker is never sent.

mod closed;
mod survey;
mod words;

use std::cmp::Reverse;
use std::io;
use std::panic::AssertUnwindSafe;
use std::thread;
use std::time::{Duration, Instant};

use hearth_transport::v1::{Grammar, grammar};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::Value;

use crate::error::ApiError;
pub(crate) use closed::closed;
use survey::{MAX_SCHEMAS, Part};

/// Parameter of a request that holds the schema.
pub(crate) const PARAM: &str = "response_format.json_schema.schema";
/// Stack size for the deepest schema that [`survey`] accepts, several times over.
const STACK_BYTES: usize = 32 << 20;
/// Maximum number of parts among which the one at fault is looked for: each is compiled by itself.
const MAX_TRIALS: usize = 200;
/// Time limit of that search: the problem is known by then, only its place is not.
const TRIALS_WITHIN: Duration = Duration::from_millis(500);

/// Maximum bytes of all schemas of a request, as JSON text.
pub(crate) const MAX_BYTES: usize = 1 << 20;

/// The schemas of one request, checked together since each takes time and memory.
pub(crate) struct Schemas<'w> {
    bytes: usize,
    count: usize,
    is_wanted: &'w (dyn Fn() -> bool + Sync),
    trials_within: Duration,
}

impl<'w> Schemas<'w> {
    /// Starts without any schema. `is_wanted` tells whether the client is still there: long work asks it.
    pub(crate) fn new(is_wanted: &'w (dyn Fn() -> bool + Sync)) -> Self {
        Self {
            bytes: 0,
            count: 0,
            is_wanted,
            trials_within: TRIALS_WITHIN,
        }
    }

    /// Refuses a schema that cannot be compiled into a grammar, that asks for more than can be followed, by itself or
    /// together with those checked before, or that no answer can satisfy.
    ///
    /// # Errors
    /// 400 at `param` with the part at fault and the remedy.
    pub(crate) fn check(&mut self, schema: &Value, param: &str) -> Result<(), ApiError> {
        self.bytes += text_bytes(schema);
        if self.bytes > MAX_BYTES {
            let problem = format!(
                "with those before it, it has {} bytes of JSON, and {MAX_BYTES} are accepted: write fewer or shorter values",
                self.bytes
            );
            return Err(refused(param, &problem));
        }
        let parts = survey::parts(schema).map_err(|problem| refused(param, &problem))?;
        self.count += parts.len();
        let problem = survey::excess(&parts).or_else(|| {
            (self.count > MAX_SCHEMAS).then(|| {
                format!(
                    "with those before it, it consists of {} schemas, and {MAX_SCHEMAS} are accepted: leave some out",
                    self.count
                )
            })
        });
        if let Some(problem) = problem {
            return Err(refused(param, &problem));
        }
        if let Some(path) = survey::endless(&parts) {
            let at = survey::place(path);
            let problem = format!(
                "{at}'$ref' refers to itself without end: make it optional, or end it with an alternative such as null"
            );
            return Err(refused(param, &problem));
        }
        let problem = on_a_deep_stack(|| {
            let reason = compile(schema).err()?;
            let path = self.culprit(schema, &parts, &reason);
            Some(words::explain(&reason, path))
        })?;
        problem.map_or(Ok(()), |problem| Err(refused(param, &problem)))
    }

    /// Finds the path of the smallest part that fails by itself for the same reason; empty if it was not found in time, or
    /// the client has left.
    fn culprit<'p>(&self, root: &Value, parts: &'p [Part<'_>], reason: &str) -> &'p str {
        if parts.len() > MAX_TRIALS {
            return "";
        }
        let until = Instant::now() + self.trials_within;
        let fails_alike = |part: &Part<'_>| {
            let mut part = part.schema.clone();
            if let Some(members) = part.as_object_mut() {
                for word in ["$defs", "definitions"] {
                    if let Some(definitions) = root.get(word) {
                        members.insert(word.to_owned(), definitions.clone());
                    }
                }
            }
            compile(&part).is_err_and(|error| error == reason)
        };
        let mut deepest_first: Vec<&Part<'_>> = parts.iter().rev().collect();
        deepest_first.sort_by_key(|part| Reverse(part.path.len()));
        for part in deepest_first {
            if !(self.is_wanted)() || Instant::now() >= until {
                break;
            }
            if fails_alike(part) {
                return &part.path;
            }
        }
        ""
    }
}

/// Length of a value as JSON text, in bytes.
pub(crate) fn text_bytes(value: &Value) -> usize {
    struct Counted(usize);
    impl io::Write for Counted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counted = Counted(0);
    match serde_json::to_writer(&mut counted, value) {
        Ok(()) => counted.0,
        Err(_) => usize::MAX,
    }
}

/// Returns a worker's refusal of a request with `grammar` as an error, about the schema if that is the cause.
pub(crate) fn rejected(message: String, grammar: Option<&Grammar>) -> ApiError {
    let param = match grammar.and_then(|grammar| grammar.kind.as_ref()) {
        Some(grammar::Kind::JsonSchema(_)) => PARAM,
        Some(grammar::Kind::Lark(_)) => "tools",
        Some(grammar::Kind::JsonObject(_)) | None => "",
    };
    if !param.is_empty() && words::is_limit(&message) {
        return refused(param, &words::explain(&message, ""));
    }
    ApiError::invalid(message).with_code("rejected_by_worker")
}

fn refused(param: &str, problem: &str) -> ApiError {
    ApiError::parameter(
        param,
        format!("'{param}' is not a JSON schema that can be followed: {problem}"),
    )
    .with_code("invalid_json_schema")
}

/// Compiles a schema into a grammar and checks that an answer can begin.
fn compile(schema: &Value) -> Result<(), String> {
    let mut schema = closed(schema);
    if let Some(members) = schema.as_object_mut() {
        // Options of the library, which are not the client's to set.
        members.remove("x-guidance");
    }
    let compiled = panic_utils::catch_unwind(AssertUnwindSafe(|| {
        // Single bytes suffice as tokens to see that something follows.
        let mut factory = ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env())?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        let mut matcher =
            Matcher::new(factory.create_parser(TopLevelGrammar::from_json_schema(schema)));
        matcher.compute_mask_or_eos()
    }));
    compiled.map(drop).map_err(|error| error.to_string())
}

/// Runs `work` on a thread whose stack has room for recursion.
///
/// # Errors
/// 500 if the system has no thread for it.
fn on_a_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, ApiError> {
    let done = thread::scope(|scope| {
        let thread = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work);
        thread.ok()?.join().ok()
    });
    done.ok_or_else(|| ApiError::internal("the schema could not be checked"))
}

#[cfg(test)]
mod tests;
