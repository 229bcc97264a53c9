//! `hearth-worker fetch`: fetches a model from an archive at a URL.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use hearth_crds::format_bytes;
use hearth_fetch::{Cache, Credentials, FetchOptions, Phase, Progress, Source};
use serde::Serialize;

use crate::environment::Environment;
use crate::logging;

/// Minimum time between two human-readable lines about one phase.
const LINE_PERIOD: Duration = Duration::from_secs(1);

/// Arguments of `fetch`.
#[derive(Args)]
pub(crate) struct FetchArgs {
    /// An http or https URL of a .tar, .tar.gz or .tar.zst of a model's directory
    #[arg(
        long,
        value_name = "URL",
        env = "HEARTH_MODEL_URL",
        hide_env_values = true
    )]
    url: String,
    /// SHA-256 of the archive, as sha256sum prints it
    #[arg(long, value_name = "HEX")]
    sha256: String,
    /// Open the URL with HEARTH_MODEL_TOKEN, or with HEARTH_MODEL_USERNAME and HEARTH_MODEL_PASSWORD
    #[arg(long)]
    credentials: bool,
    /// Directory of the cache: the model is put into its models/, parts of archives lie in its partial/
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    /// Print progress and the directory as lines of JSON
    #[arg(long)]
    json: bool,
}

/// One line of JSON output.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    /// Progress of the fetch.
    Progress {
        /// `waiting`, `checking`, `connecting`, `downloading` or `unpacking`.
        phase: &'a str,
        /// Bytes of the archive processed so far.
        bytes: u64,
        /// Size of the archive in bytes; null until it is known.
        total_bytes: Option<u64>,
        bytes_per_second: u64,
        /// Reason the connection was lost; null if it was not.
        trouble: Option<&'a str>,
    },
    /// The model is complete.
    Fetched {
        /// Its directory.
        directory: &'a Path,
    },
}

/// Fetches the model and prints its directory.
pub(crate) fn run(args: &FetchArgs, environment: &Environment) -> anyhow::Result<()> {
    let mut source = Source::new(&args.url, &args.sha256)?;
    if args.credentials {
        source = source.opened_by(credentials(environment)?);
    }
    let cache = Cache::new(&args.into);
    let lines = Lines {
        json: args.json,
        last: Mutex::default(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let observer = Arc::new(move |progress: &Progress| lines.tell(progress));
    let options = FetchOptions::default();
    let directory = runtime.block_on(hearth_fetch::fetch(&source, &cache, &options, observer))?;
    let directory = directory
        .canonicalize()
        .with_context(|| format!("{}", directory.display()))?;
    if args.json {
        let event = Event::Fetched {
            directory: &directory,
        };
        logging::print_data(&format!("{}\n", serde_json::to_string(&event)?))
    } else {
        logging::print_data(&format!("{}\n", directory.display()))
    }
}

/// Reads credentials from the environment: arguments are visible to all users of the machine.
fn credentials(environment: &Environment) -> anyhow::Result<Credentials> {
    if let Some(token) = environment.model_token.clone() {
        return Ok(Credentials::Bearer { token });
    }
    let username = environment.model_username.clone().context(
        "--credentials was given, and neither HEARTH_MODEL_TOKEN nor HEARTH_MODEL_USERNAME is set\n  set one of them, or leave --credentials out",
    )?;
    let password = environment.model_password.clone().unwrap_or_default();
    Ok(Credentials::Basic { username, password })
}

/// Prints progress on standard output as JSON, or on standard error as text.
struct Lines {
    json: bool,
    last: Mutex<Option<(Instant, Phase)>>,
}

impl Lines {
    fn tell(&self, progress: &Progress) {
        let Progress {
            phase,
            bytes,
            total_bytes,
            bytes_per_second,
            trouble,
        } = progress;
        if self.json {
            return print_event(&Event::Progress {
                phase: phase.as_str(),
                bytes: *bytes,
                total_bytes: *total_bytes,
                bytes_per_second: *bytes_per_second,
                trouble: trouble.as_deref(),
            });
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = last.is_none_or(|(at, before)| before != *phase || at.elapsed() > LINE_PERIOD);
        if is_new {
            *last = Some((Instant::now(), *phase));
            logging::say(sentence(progress));
        }
    }
}

/// Formats progress, such as `downloading: 1.2 GiB of 4 GiB, 110.5 MiB/s`.
pub(crate) fn sentence(progress: &Progress) -> String {
    let mut text = progress.phase.as_str().to_owned();
    if progress.phase == Phase::Waiting {
        text += " for another process that fetches it";
    }
    if progress.bytes > 0 {
        text += &format!(": {}", format_bytes(progress.bytes));
        if let Some(total_bytes) = progress.total_bytes {
            text += &format!(" of {}", format_bytes(total_bytes));
        }
    }
    if progress.bytes_per_second > 0 {
        text += &format!(", {}/s", format_bytes(progress.bytes_per_second));
    }
    if let Some(trouble) = &progress.trouble {
        text += &format!(" ({trouble})");
    }
    text
}

fn print_event(event: &Event<'_>) {
    if let Ok(line) = serde_json::to_string(event) {
        // If a line cannot be written, the error surfaces at the last line, which contains the model's directory.
        let _ = logging::print_data(&format!("{line}\n"));
    }
}
