//! Models behind URLs: `hearth-worker fetch` downloads them into this user's cache.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail};
use hearth_crds::HttpSource;
use serde::Deserialize;

use crate::environment::Environment;
use crate::terminal::ui::{self, Busy, Steps};
use crate::up::worker;

/// A line of `hearth-worker fetch --json`.
#[derive(Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    Progress(Progress),
    Fetched { directory: PathBuf },
}

#[derive(Deserialize)]
struct Progress {
    phase: String,
    bytes: u64,
    total_bytes: Option<u64>,
    bytes_per_second: u64,
    trouble: Option<String>,
}

/// Returns the directory of the model in the archive, fetching it if it is not in the cache. `name` is the model's.
///
/// # Errors
/// The worker's own message; no home directory for the cache.
pub(crate) fn fetch(
    source: &HttpSource,
    name: &str,
    environment: &Environment,
    steps: &Steps,
) -> anyhow::Result<PathBuf> {
    const TOOL: &str = "fetch";
    let program = worker::program(environment)?;
    let mut command = Command::new(&program);
    command
        .args([TOOL, "--json", "--sha256", &source.sha256])
        // Arguments are visible to every user of the machine, and a URL may contain credentials.
        .env("HEARTH_MODEL_URL", &source.url);
    if let Some(secret) = &source.secret_ref {
        check_credentials(&secret.name, environment)?;
        command.arg("--credentials");
    }
    let cache = environment.model_directory().context(
        "there is no home directory to keep models in\n  name a directory: HEARTH_CACHE=DIR",
    )?;
    let mut child = command
        .arg("--into")
        .arg(cache)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{} cannot be run", program.display()))?;
    let mut screen = Screen {
        name,
        steps,
        bar: steps.bar(&format!("{name}: asking for it")),
        began: Instant::now(),
        fetched_bytes: None,
    };
    let (directory, errors) = follow(&mut child, &mut screen)?;
    screen.bar.finish();
    let status = child.wait()?;
    let Some(directory) = directory.filter(|_| status.success()) else {
        return Err(worker::failure(&program, TOOL, status, &errors));
    };
    screen.done(&directory);
    Ok(directory)
}

/// Checks the environment for credentials, which replace a Secret on a single machine and are inherited by the worker.
fn check_credentials(secret: &str, environment: &Environment) -> anyhow::Result<()> {
    if environment.has_model_credentials {
        return Ok(());
    }
    bail!(
        "spec.model.source.http.secretRef names {secret}, and Secrets exist only in a cluster\n  \
         set HEARTH_MODEL_TOKEN, or HEARTH_MODEL_USERNAME and HEARTH_MODEL_PASSWORD, or remove secretRef"
    )
}

/// Shows progress until the child closes its output; returns the directory, and the child's standard error.
fn follow(
    child: &mut Child,
    screen: &mut Screen<'_>,
) -> anyhow::Result<(Option<PathBuf>, Vec<u8>)> {
    let stderr = child.stderr.take();
    // On a separate thread: a full pipe would block the child.
    let errors = std::thread::spawn(move || {
        let mut text = Vec::new();
        if let Some(mut stderr) = stderr {
            // A read error only truncates the message.
            let _ = stderr.read_to_end(&mut text);
        }
        text
    });
    let mut directory = None;
    for line in child
        .stdout
        .take()
        .map(BufReader::new)
        .into_iter()
        .flat_map(BufRead::lines)
    {
        let line = line.context("the worker's progress cannot be read")?;
        match serde_json::from_str(&line).with_context(|| worker::misunderstood("fetch"))? {
            Event::Progress(progress) => screen.show(progress),
            Event::Fetched { directory: fetched } => directory = Some(fetched),
        }
    }
    Ok((directory, errors.join().unwrap_or_default()))
}

/// One fetch as displayed to the user.
struct Screen<'a> {
    name: &'a str,
    steps: &'a Steps,
    bar: Busy,
    began: Instant,
    /// Size of the archive; `None` if nothing had to be fetched.
    fetched_bytes: Option<u64>,
}

impl Screen<'_> {
    fn show(&mut self, progress: Progress) {
        let Progress {
            phase,
            bytes,
            total_bytes,
            bytes_per_second,
            trouble,
        } = progress;
        let mut text = format!("{}: {phase}", self.name);
        if bytes > 0 {
            text += &format!(" {}", ui::bytes(bytes));
        }
        if let Some(total_bytes) = total_bytes {
            text += &format!(" of {}", ui::bytes(total_bytes));
        }
        if bytes_per_second > 0 {
            text += &format!(", {}/s", ui::bytes(bytes_per_second));
        }
        if let Some(trouble) = &trouble {
            text += &format!(" ({trouble})");
        }
        self.fetched_bytes = Some(total_bytes.unwrap_or(bytes));
        self.bar.reached(bytes, total_bytes.unwrap_or(bytes));
        self.bar.say(text);
    }

    fn done(&self, directory: &Path) {
        let Some(bytes) = self.fetched_bytes else {
            return self.steps.done_with(
                &format!("{} is in the cache", self.name),
                &directory.display().to_string(),
            );
        };
        let took_ms = self.began.elapsed().as_secs_f64() * 1e3;
        self.steps.done_with(
            &format!(
                "{} fetched and verified: {} in {}",
                self.name,
                ui::bytes(bytes),
                ui::milliseconds(took_ms)
            ),
            &directory.display().to_string(),
        );
    }
}
