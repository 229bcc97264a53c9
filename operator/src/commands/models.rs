//! `hearth models`: the models in this user's cache, which all deployments of `hearth up` share.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use hearth_crds::StoredModel;

use crate::environment::Environment;
use crate::terminal::table::{self, OutputFormat, age};
use crate::terminal::ui::{self, Steps};
use crate::up::fetched::{self, Wanted};
use crate::up::interrupts::{Interrupts, STOPPED, Stopped};
use crate::up::state::{StateArgs, StateDir};
use crate::up::worker;

const EXAMPLES: &str = "Examples:\n  hearth models pull Qwen/Qwen3-0.6B\n  hearth models list\n  hearth models pin Qwen/Qwen3-0.6B\n  hearth models rm Qwen/Qwen3-0.6B\n\
     Environment:\n  HEARTH_CACHE is the directory of the cache, HEARTH_MODEL_TOKEN opens gated repositories, HF_ENDPOINT names a mirror\n  \
     HEARTH_CA_BUNDLE is a PEM file of further certificate authorities; HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY name proxies\n  \
     HEARTH_MODEL_QUOTA (200Gi) and HEARTH_MODEL_RESERVE (percent of the disk) limit the cache: the least recently used models go\n  \
     HEARTH_DOWNLOAD_RATE (20Mi) limits downloads, in bytes a second\n  \
     HEARTH_STATE_DIR is the directory of running deployments, whose models rm leaves";
/// Digits of a commit or a checksum that a table shows.
const SHORT_DIGITS: usize = 12;
/// The worker's tool.
const TOOL: &str = "models";

/// Arguments of `hearth models`.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ModelsArgs {
    #[command(subcommand)]
    command: Models,
    #[command(flatten)]
    state: StateArgs,
}

#[derive(Subcommand)]
enum Models {
    /// Fetch a repository of the Hugging Face Hub; one that is in the cache is left as it is
    Pull {
        /// owner/name, or owner/name@revision with a branch, tag or commit (default: main)
        repo: String,
    },
    /// Show the models that are in the cache, and downloads that are not complete
    List {
        /// table, json or yaml
        #[arg(short, long, value_enum, default_value_t)]
        output: OutputFormat,
    },
    /// Keep a model when room is made for others, until it is unpinned
    Pin {
        /// Its name or its key, as list shows them
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        model: String,
    },
    /// Take back pin
    Unpin {
        /// Its name or its key, as list shows them
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        model: String,
    },
    /// Remove a model that is neither in use nor pinned, or what has arrived of one, from the cache
    Rm {
        /// Its name or its key, as list shows them
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        model: String,
    },
}

/// Runs the chosen command.
pub(crate) fn run(args: &ModelsArgs, environment: &Environment) -> anyhow::Result<ExitCode> {
    match &args.command {
        Models::Pull { repo } => return pull(repo, environment),
        Models::List { output } => list(*output, environment)?,
        Models::Pin { model } => set_pinned(model, true, environment)?,
        Models::Unpin { model } => set_pinned(model, false, environment)?,
        Models::Rm { model } => remove(model, &args.state, environment)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn pull(named: &str, environment: &Environment) -> anyhow::Result<ExitCode> {
    let (repo, revision) = match named.split_once('@') {
        Some((repo, revision)) => (repo, Some(revision)),
        None => (named, None),
    };
    let wanted = Wanted::Repository {
        repo,
        revision,
        has_token: environment.has_model_token,
    };
    let steps = Steps::new(environment);
    let interrupts = Interrupts::listen()?;
    match fetched::fetch(&wanted, repo, environment, &steps, &interrupts) {
        Ok(directory) => {
            ui::print_data(&format!("{}\n", directory.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if error.is::<Stopped>() => {
            ui::say(format_args!(
                "{error}; hearth models pull {named} goes on from there, hearth models list shows what is there"
            ));
            Ok(ExitCode::from(STOPPED))
        }
        Err(error) => Err(error),
    }
}

fn list(output: OutputFormat, environment: &Environment) -> anyhow::Result<()> {
    let stored = stored(environment, None)?;
    if stored.is_empty() && output == OutputFormat::Table {
        ui::say(format_args!(
            "no model is in {}\n  fetch one: hearth models pull OWNER/NAME",
            fetched::cache(environment)?.display()
        ));
        return Ok(());
    }
    output.print(&stored, || table(&stored))
}

fn table(stored: &[StoredModel]) -> String {
    let rows = stored.iter().map(|model| {
        let digits = model.commit.as_deref().or(model.sha256.as_deref());
        let digits = digits.map_or("-", |digits| digits.get(..SHORT_DIGITS).unwrap_or(digits));
        let used = model.used_at_s.and_then(|at| i64::try_from(at).ok());
        [
            model.name().to_owned(),
            digits.to_owned(),
            size(model),
            used.map_or_else(|| "-".to_owned(), age),
            state(model),
            model.key.clone(),
        ]
    });
    table::plain(&["MODEL", "COMMIT", "SIZE", "USED", "STATE", "KEY"], rows)
}

/// Bytes of a model, such as `1.2 GiB of 4.0 GiB` while it is not complete, and those that are not its own alone.
fn size(model: &StoredModel) -> String {
    let mut text = ui::bytes(model.bytes);
    if let Some(total_bytes) = model.partial.and_then(|partial| partial.total_bytes) {
        text += &format!(" of {}", ui::bytes(total_bytes));
    }
    if model.shared_bytes > 0 {
        text += &format!(", {} shared", ui::bytes(model.shared_bytes));
    }
    text
}

/// Why a model stays, such as `in use, pinned`, or that it is not complete; `-` if nothing keeps it.
fn state(model: &StoredModel) -> String {
    if let Some(partial) = model.partial {
        return match partial.is_running {
            true => "partial, being fetched",
            false => "partial",
        }
        .to_owned();
    }
    match (model.in_use, model.pinned) {
        (true, true) => "in use, pinned",
        (true, false) => "in use",
        (false, true) => "pinned",
        (false, false) => "-",
    }
    .to_owned()
}

fn set_pinned(named: &str, pinned: bool, environment: &Environment) -> anyhow::Result<()> {
    let stored = self::stored(environment, None)?;
    let model = chosen(named, &stored)?;
    if model.partial.is_some() {
        bail!(
            "{} is not complete\n  fetch the rest first: hearth models pull {named}",
            model.name()
        );
    }
    let flag = if pinned { "--pin" } else { "--unpin" };
    self::stored(environment, Some((flag, &model.key)))?;
    ui::say(format_args!(
        "{} {}",
        model.name(),
        match pinned {
            true => "is pinned: it stays until hearth models unpin",
            false => "is no longer pinned",
        }
    ));
    Ok(())
}

fn remove(named: &str, state: &StateArgs, environment: &Environment) -> anyhow::Result<()> {
    let stored = self::stored(environment, None)?;
    let model = chosen(named, &stored)?;
    if model.partial.is_none() {
        check_unserved(model, state, environment)?;
    }
    self::stored(environment, Some(("--remove", &model.key)))?;
    let free = ui::bytes(model.bytes.saturating_sub(model.shared_bytes));
    let mut text = match model.partial {
        Some(_) => format!(
            "removed what had arrived of {}: {free} are free again",
            model.name()
        ),
        None => format!("removed {}: {free} are free again", model.name()),
    };
    if model.shared_bytes > 0 {
        let shared = ui::bytes(model.shared_bytes);
        text += &format!(", {shared} stay for other models that have the same files");
    }
    ui::say(text);
    Ok(())
}

/// Checks that no deployment of this machine serves the model.
fn check_unserved(
    model: &StoredModel,
    state: &StateArgs,
    environment: &Environment,
) -> anyhow::Result<()> {
    let state = StateDir::locate(state.state_dir.as_deref(), environment)?;
    let directory = model.directory.canonicalize();
    let directory = directory.with_context(|| format!("{}", model.directory.display()))?;
    // Processes of this version hold the directory, so the worker refuses, too; but it knows no deployment's name, and
    // those of earlier versions hold nothing.
    for (name, plan) in state.running_plans()? {
        match plan {
            Ok(plan) if directory == Path::new(&plan.model.path) => bail!(
                "{} is being served by {name}\n  stop it with Ctrl-C there first",
                model.name(),
            ),
            Ok(_) => {}
            Err(error) => bail!(
                "{} may be in use by {name}, which runs here: {error}\n  stop {name} with Ctrl-C there first",
                model.name(),
            ),
        }
    }
    Ok(())
}

/// The model of this name or key. A repository may be named without its revision, if it is there with only one.
fn chosen<'a>(named: &str, stored: &'a [StoredModel]) -> anyhow::Result<&'a StoredModel> {
    let is_named = |model: &&StoredModel| {
        let is_repo = || {
            let repo = model.name().rsplit_once('@').map(|(repo, _)| repo);
            model.commit.is_some() && repo == Some(named)
        };
        model.key == named || model.source.as_deref() == Some(named) || is_repo()
    };
    let found: Vec<&StoredModel> = stored.iter().filter(is_named).collect();
    match found.as_slice() {
        [only] => Ok(only),
        [] => bail!("{named} is not in the cache\n  hearth models list shows what is"),
        several => {
            let keys: Vec<String> = several
                .iter()
                .map(|model| format!("{} ({})", model.name(), model.key))
                .collect();
            bail!(
                "{named} is several models: {}\n  name one by its key",
                keys.join(", ")
            )
        }
    }
}

/// Asks the worker for the models in the cache; `change` is an argument with the key of one to change first.
fn stored(
    environment: &Environment,
    change: Option<(&str, &str)>,
) -> anyhow::Result<Vec<StoredModel>> {
    let cache = fetched::cache(environment)?;
    let mut arguments: Vec<&OsStr> = [TOOL, "--json", "--in"].map(OsStr::new).to_vec();
    arguments.push(cache.as_os_str());
    if let Some((flag, key)) = change {
        arguments.extend([flag, key].map(OsStr::new));
    }
    let told = worker::ask(environment, &Interrupts::default(), &arguments, |_| {});
    match change {
        Some(_) => told.map_err(|error| fetched::of_cache(error, environment)),
        None => told,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use hearth_crds::PartialModel;

    use super::*;

    fn model(key: &str, source: Option<&str>, commit: Option<&str>) -> StoredModel {
        StoredModel {
            key: key.to_owned(),
            source: source.map(str::to_owned),
            commit: commit.map(str::to_owned),
            sha256: None,
            bytes: 3 << 20,
            shared_bytes: 0,
            partial: None,
            used_at_s: None,
            verified_at_s: None,
            in_use: false,
            pinned: false,
            directory: PathBuf::from("/cache/models").join(key),
        }
    }

    #[test]
    fn a_model_is_named_by_repository_revision_url_or_key() {
        let stored = [
            model("k1", Some("a/b@main"), Some("c1")),
            model("k2", Some("a/c@main"), Some("c1")),
            model("k3", Some("a/c@v2"), Some("c2")),
            model("k4", Some("http://nas/m@1.tar"), None),
            model("k5", None, None),
        ];
        let key = |named: &str| chosen(named, &stored).map(|model| model.key.clone());
        for (named, expected) in [
            ("a/b", "k1"),
            ("a/b@main", "k1"),
            ("a/c@v2", "k3"),
            ("http://nas/m@1.tar", "k4"),
            ("k5", "k5"),
        ] {
            assert_eq!(key(named).unwrap(), expected);
        }
        let several = key("a/c").unwrap_err().to_string();
        assert!(
            several.contains("k2") && several.contains("k3"),
            "{several}"
        );
        for named in ["a/d", "http://nas/m", "-"] {
            let missing = key(named).unwrap_err().to_string();
            assert!(missing.contains("hearth models list"), "{missing}");
        }
    }

    #[test]
    fn a_table_tells_commit_and_size() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let text = table(&[model("k1", Some("a/b@main"), Some(commit))]);
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            words,
            ["a/b@main", "0123456789ab", "3", "MiB", "-", "-", "k1"]
        );
        let kept = StoredModel {
            in_use: true,
            pinned: true,
            ..model("k1", Some("a/b@main"), None)
        };
        assert!(table(&[kept]).contains("in use, pinned"));
        let partial = |is_running| StoredModel {
            shared_bytes: 1 << 20,
            partial: Some(PartialModel {
                total_bytes: Some(7 << 20),
                is_running,
            }),
            ..model("k1", Some("a/b@main"), None)
        };
        let text = table(&[partial(true), partial(false)]);
        for words in ["3 MiB of 7 MiB, 1 MiB shared", "partial, being fetched"] {
            assert!(text.contains(words), "{text}");
        }
    }
}
