//! Models behind URLs and of hubs: `hearth-worker fetch` downloads them into this user's cache.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use hearth_crds::{HttpSource, ModelSource, format_remaining};
use rustix::fs::{Access, access};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::environment::Environment;
use crate::terminal::ui::{self, Busy, Steps};
use crate::up::interrupts::{Interrupts, Stopped};
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

/// The worker's tool.
const TOOL: &str = "fetch";
/// The phase in which bytes arrive.
const DOWNLOADING: &str = "downloading";

/// What is fetched, and what opens it.
pub(crate) enum Wanted<'a> {
    /// An archive or files behind URLs.
    Http(&'a HttpSource),
    /// A repository of the hub. `has_token` says whether the environment's credentials open it.
    Repository {
        repo: &'a str,
        revision: Option<&'a str>,
        has_token: bool,
    },
}

/// Returns what the source fetches; `None` if it fetches nothing.
///
/// # Errors
/// It needs a Secret, and the environment holds no credentials in its place.
pub(crate) fn wanted<'a>(
    source: &'a ModelSource,
    environment: &Environment,
) -> anyhow::Result<Option<Wanted<'a>>> {
    if let Some(http) = &source.http {
        if let Some(secret) = &http.secret_ref {
            check_credentials(&secret.name, environment)?;
        }
        return Ok(Some(Wanted::Http(http)));
    }
    let Some(hub) = &source.hugging_face else {
        return Ok(None);
    };
    if let Some(secret) = &hub.token_secret_ref {
        check_token(&secret.name, environment)?;
    }
    Ok(Some(Wanted::Repository {
        repo: &hub.repo,
        revision: hub.revision.as_deref(),
        has_token: hub.token_secret_ref.is_some(),
    }))
}

/// Returns the directory of the model, fetching it if it is not in the cache. `name` is the model's.
///
/// # Errors
/// The worker's own message; the directory of the cache cannot be used; [`Stopped`].
pub(crate) fn fetch(
    wanted: &Wanted<'_>,
    name: &str,
    environment: &Environment,
    steps: &Steps,
    interrupts: &Interrupts,
) -> anyhow::Result<PathBuf> {
    let fetched = follow(wanted, name, environment, steps, interrupts);
    fetched.map_err(|error| of_cache(error, environment))
}

/// Runs the worker's tool, and shows how far it is.
fn follow(
    wanted: &Wanted<'_>,
    name: &str,
    environment: &Environment,
    steps: &Steps,
    interrupts: &Interrupts,
) -> anyhow::Result<PathBuf> {
    let program = worker::program(environment)?;
    let (mut command, list) = command(&program, wanted, environment)?;
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = interrupts
        .spawn(&mut command)
        .with_context(|| format!("{} cannot be run", program.display()))?;
    if let (Some(list), Some(mut input)) = (list, child.stdin.take()) {
        // A worker that has ended before it read all says why.
        let _ = input.write_all(&list);
    }
    let mut screen = Screen {
        name,
        steps,
        bar: steps.bar(&format!("{name}: asking for it")),
        began: Instant::now(),
        fetched_bytes: None,
        here: (0, None),
        has_told_trouble: false,
    };
    let (directory, errors) = hear(&mut child, &mut screen)?;
    screen.bar.finish();
    let Some(status) = interrupts.wait(&mut child)? else {
        let kept = screen.kept();
        return Err(Stopped(format!("the fetch of {name} was stopped: {kept}")).into());
    };
    if let Some(directory) = directory.filter(|_| status.success()) {
        screen.done(&directory);
        return Ok(directory);
    }
    Err(worker::failure(&program, TOOL, status, &errors))
}

/// The worker's tool for what is wanted, and what it is to read.
fn command(
    program: &Path,
    wanted: &Wanted<'_>,
    environment: &Environment,
) -> anyhow::Result<(Command, Option<Vec<u8>>)> {
    let mut command = Command::new(program);
    command
        .args([
            TOOL,
            "--json",
            "--with-parent",
            &std::process::id().to_string(),
        ])
        .stdin(Stdio::null());
    let mut list = None;
    match wanted {
        Wanted::Http(http) => {
            // Arguments are visible to every user of the machine, and a URL may contain credentials.
            if http.files.is_empty() {
                command
                    .args(["--sha256", &http.sha256])
                    .env("HEARTH_MODEL_URL", &http.url);
            } else {
                list = Some(serde_json::to_vec(&http.files)?);
                command
                    .args(["--files", "-"])
                    .env_remove("HEARTH_MODEL_URL")
                    .stdin(Stdio::piped());
            }
            if http.secret_ref.is_some() {
                command.arg("--credentials");
            }
        }
        Wanted::Repository {
            repo,
            revision,
            has_token,
        } => {
            command
                .args(["--repo", repo])
                .env_remove("HEARTH_MODEL_URL");
            if let Some(revision) = revision {
                command.args(["--revision", revision]);
            }
            if *has_token {
                command.arg("--credentials");
            }
        }
    }
    command.arg("--into").arg(cache(environment)?);
    Ok((command, list))
}

/// Waits for and holds a model's directory until the file is dropped, as its workers do (`Hold` of the crate hearth-fetch). `None` if it
/// cannot be held.
pub(crate) fn hold(directory: &Path) -> Option<File> {
    let directory = File::open(directory).ok()?;
    directory.lock_shared().ok().map(|()| directory)
}

/// Records that a model was in use until now, if it is of this user's cache: others go first when room is needed.
pub(crate) fn note_use(directory: &Path, environment: &Environment) {
    let Some(cache) = environment.model_directory() else {
        return;
    };
    let models = cache.join("models").canonicalize().ok();
    let key = directory.file_name().map(OsStr::to_owned);
    let (Some(key), true) = (key, models.as_deref() == directory.parent()) else {
        return;
    };
    let mut arguments: Vec<&OsStr> = ["models", "--json", "--in"].map(OsStr::new).to_vec();
    arguments.extend([cache.as_os_str(), OsStr::new("--used"), &key]);
    // Without the record the model merely goes a little earlier.
    let _ = worker::ask::<IgnoredAny>(environment, &Interrupts::default(), &arguments, |_| {});
}

/// The directory of this user's models, which may not exist yet.
///
/// # Errors
/// There is no home directory, or it can be no directory of models.
pub(crate) fn cache(environment: &Environment) -> anyhow::Result<PathBuf> {
    let directory = environment.model_directory().context(
        "there is no home directory to keep models in\n  name a directory: HEARTH_CACHE=DIR",
    )?;
    let why = if directory.is_relative() {
        "which is no absolute path: every command would look in another place".to_owned()
    } else {
        match std::fs::read_dir(&directory) {
            Ok(_) => return Ok(directory),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(directory),
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                "which is a file, or lies below one".to_owned()
            }
            Err(error) => format!("which cannot be read: {error}"),
        }
    };
    bail!("{}", unusable(&directory, &why, environment))
}

/// The error itself, unless it comes from a directory of models that this user may not write.
pub(crate) fn of_cache(error: anyhow::Error, environment: &Environment) -> anyhow::Error {
    let Ok(directory) = cache(environment) else {
        return error;
    };
    let writable = ["models", "partial"].map(|below| {
        let below = directory.join(below);
        let there = below.ancestors().find(|path| path.exists());
        there.map_or(Ok(()), |path| access(path, Access::WRITE_OK))
    });
    match writable.into_iter().find_map(Result::err) {
        Some(reason) => {
            let reason = std::io::Error::from(reason);
            let why = format!("where this user may not write: {reason}");
            anyhow!("{}", unusable(&directory, &why, environment))
        }
        None => error,
    }
}

/// Says why the directory of models cannot be used.
fn unusable(directory: &Path, why: &str, environment: &Environment) -> String {
    let variable = environment.model_directory_variable();
    let directory = directory.display();
    match variable {
        "HEARTH_CACHE" => format!(
            "HEARTH_CACHE is {directory}, {why}\n  name a directory of yours, such as /home/ann/models, or unset it"
        ),
        _ => format!(
            "models are kept in {directory} (by {variable}), {why}\n  name a directory of yours: HEARTH_CACHE=DIR"
        ),
    }
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

/// The same for a hub, which takes a token.
fn check_token(secret: &str, environment: &Environment) -> anyhow::Result<()> {
    if environment.has_model_token {
        return Ok(());
    }
    bail!(
        "spec.model.source.huggingFace.tokenSecretRef names {secret}, and Secrets exist only in a cluster\n  \
         set HEARTH_MODEL_TOKEN, or remove tokenSecretRef"
    )
}

/// Shows progress until the child closes its output; returns the directory, and the child's standard error.
fn hear(child: &mut Child, screen: &mut Screen<'_>) -> anyhow::Result<(Option<PathBuf>, Vec<u8>)> {
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
        match serde_json::from_str(&line).with_context(|| worker::misunderstood(TOOL))? {
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
    /// Size of what was fetched; `None` if nothing had to be.
    fetched_bytes: Option<u64>,
    /// Bytes that are here, and of how many.
    here: (u64, Option<u64>),
    /// Whether a line has told that a connection failed and is tried again.
    has_told_trouble: bool,
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
        let left = format_remaining(bytes, total_bytes.unwrap_or_default(), bytes_per_second);
        if let Some(left) = left.filter(|_| phase == DOWNLOADING) {
            text += &format!(", {left} left");
        }
        if let Some(trouble) = &trouble {
            text += &format!(" ({trouble})");
        }
        if let Some(trouble) = trouble.filter(|_| !self.has_told_trouble) {
            self.has_told_trouble = true;
            let (name, steps) = (self.name, self.steps);
            self.bar
                .suspend(|| steps.warn(&format!("{name}: {trouble}")));
        }
        self.here = (bytes, total_bytes);
        self.fetched_bytes = Some(total_bytes.unwrap_or(bytes));
        self.bar.reached(bytes, total_bytes.unwrap_or(bytes));
        self.bar.say(text);
    }

    /// What has arrived, in words.
    fn kept(&self) -> String {
        match self.here {
            (0, _) => "nothing has arrived meanwhile".to_owned(),
            (bytes, None) => format!("{} that have arrived are kept", ui::bytes(bytes)),
            (bytes, Some(total_bytes)) => format!(
                "{} of {} that have arrived are kept",
                ui::bytes(bytes),
                ui::bytes(total_bytes)
            ),
        }
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
