//! `hearth-worker fetch`: fetches a model from an archive at a URL, a list of files, or a repository of a hub.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{HUB_ENDPOINT, HttpFile, HttpSource, format_bytes, format_remaining};
use hearth_fetch::{Cache, Claim, Claims, Credentials, FetchOptions, Phase, Progress, Source};
use serde::Serialize;

use crate::environment::Environment;
use crate::logging;
use crate::signals;
use crate::tools::StoreArgs;

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
        hide_env_values = true,
        required_unless_present_any = ["repo", "files"],
        requires = "sha256"
    )]
    url: Option<String>,
    /// SHA-256 of the archive, as sha256sum prints it
    #[arg(long, value_name = "HEX", conflicts_with_all = ["repo", "files"])]
    sha256: Option<String>,
    /// A file with a JSON list of the model's files instead of a URL: [{"url": URL, "sha256": HEX, "path": NAME}, ...]; - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "repo"])]
    files: Option<PathBuf>,
    /// A repository of the Hugging Face Hub, or of its mirror in HF_ENDPOINT, instead of a URL
    #[arg(long, value_name = "OWNER/NAME", conflicts_with = "url")]
    repo: Option<String>,
    /// Branch, tag or commit of the repository (default: main)
    #[arg(long, value_name = "REVISION", requires = "repo")]
    revision: Option<String>,
    /// Open the source with HEARTH_MODEL_TOKEN, or a URL with HEARTH_MODEL_USERNAME and HEARTH_MODEL_PASSWORD
    #[arg(long)]
    credentials: bool,
    /// Directory of the cache: the model is put into its models/, parts of archives lie in its partial/
    #[arg(long, value_name = "DIR")]
    into: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
    /// Percent of the disk that models leave free; with it or a quota, the least recently used models are removed to make room
    #[arg(long, value_name = "PERCENT", default_value_t = 0, env = "HEARTH_MODEL_RESERVE",
        value_parser = clap::value_parser!(u8).range(0..=99))]
    disk_reserve: u8,
    /// Print progress and the directory as lines of JSON
    #[arg(long)]
    json: bool,
    /// End when the parent process ends, which is this one
    #[arg(long, value_name = "PID", hide = true)]
    with_parent: Option<u32>,
}

/// One line of JSON output.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event<'a> {
    /// Progress of the fetch.
    Progress {
        /// `waiting`, `checking`, `connecting`, `downloading` or `unpacking`.
        phase: &'a str,
        /// Bytes of the archive, or of all files, processed so far.
        bytes: u64,
        /// Size of the archive, or of all files, in bytes; null until it is known.
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
    if let Some(parent) = args.with_parent {
        signals::end_with_parent(parent)?;
    }
    let mut source = source(args, environment)?;
    if args.credentials {
        source = source.opened_by(match args.repo {
            Some(_) => hub_token(environment)?,
            None => credentials(environment)?,
        });
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
    let options = FetchOptions {
        egress: environment.egress()?,
        ..options(args)
    };
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

/// Limits of the store. Nothing is removed for another model unless a limit was set.
fn options(args: &FetchArgs) -> FetchOptions {
    let quota_bytes = args.store.quota_bytes();
    let claim = match quota_bytes.is_some() || args.disk_reserve > 0 {
        true => Claim::Free,
        false => Claim::Personal,
    };
    FetchOptions {
        quota_bytes,
        reserve_percent: args.disk_reserve,
        recent: args.store.recent(),
        throttle: args.store.throttle(),
        claims: Claims::by(move |_| claim),
        ..FetchOptions::default()
    }
}

/// The source that the arguments name.
fn source(args: &FetchArgs, environment: &Environment) -> anyhow::Result<Source> {
    if let Some(path) = &args.files {
        let files = listed(path).with_context(|| format!("--files is {}", path.display()))?;
        return Ok(Source::of_files(&HttpSource {
            files,
            ..HttpSource::default()
        })?);
    }
    match (&args.repo, &args.url, &args.sha256) {
        (Some(repo), _, _) => {
            let endpoint = environment.hub_endpoint.as_deref().unwrap_or(HUB_ENDPOINT);
            Ok(Source::of_hub(endpoint, repo, args.revision.as_deref())?)
        }
        (None, Some(url), Some(sha256)) => Ok(Source::new(url, sha256)?),
        _ => bail!(
            "no source is named\n  write --url URL --sha256 HEX, --files FILE, or --repo OWNER/NAME"
        ),
    }
}

/// Reads a list of files.
fn listed(path: &Path) -> anyhow::Result<Vec<HttpFile>> {
    let text = match path == Path::new("-") {
        true => std::io::read_to_string(std::io::stdin()),
        false => std::fs::read_to_string(path),
    };
    serde_json::from_str(&text?)
        .context("it is no list of files\n  write JSON: [{\"url\": URL, \"sha256\": HEX}, ...]")
}

/// Reads a hub's token from the environment: a user and password there are some other server's.
fn hub_token(environment: &Environment) -> anyhow::Result<Credentials> {
    let token = environment.model_token.clone().context(
        "--credentials was given with --repo, and HEARTH_MODEL_TOKEN is not set\n  set it to a token of the hub, or leave --credentials out",
    )?;
    Ok(Credentials::Bearer { token })
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
    /// When the last line was printed, in which phase, and whether it told of trouble.
    last: Mutex<Option<(Instant, Phase, bool)>>,
}

impl Lines {
    fn tell(&self, progress: &Progress) {
        let Progress {
            phase,
            bytes,
            total_bytes,
            bytes_per_second,
            from_node: _,
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
        let has_trouble = trouble.is_some();
        let is_new = last.is_none_or(|(at, before, had_trouble)| {
            (before, had_trouble) != (*phase, has_trouble) || at.elapsed() > LINE_PERIOD
        });
        if is_new {
            *last = Some((Instant::now(), *phase, has_trouble));
            logging::say(sentence(progress));
        }
    }
}

/// Formats progress, such as `downloading: 1.2 GiB of 4 GiB, 110.5 MiB/s, 26 s left`.
pub(crate) fn sentence(progress: &Progress) -> String {
    let mut text = progress.phase.as_str().to_owned();
    if progress.phase == Phase::Waiting {
        text += " for another process that fetches it";
    }
    if let Some(node) = &progress.from_node {
        text += &format!(" from {node} over the LAN");
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
    let total_bytes = progress.total_bytes.unwrap_or_default();
    if progress.phase == Phase::Downloading
        && let Some(left) = format_remaining(progress.bytes, total_bytes, progress.bytes_per_second)
    {
        text += &format!(", {left} left");
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
