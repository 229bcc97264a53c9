//! `hearth-worker models`: what a cache of models holds, removal from it, and pins.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Args;
use hearth_crds::{PartialModel, StoredModel, format_bytes};
use hearth_fetch::{Cache, Key, Stored, Unfinished};

use crate::logging;

/// Removal, which is of downloads that are not complete, too.
const REMOVE: &str = "--remove";

/// Arguments of `models`.
#[derive(Args)]
pub(crate) struct ModelsArgs {
    /// Directory of the cache
    #[arg(long = "in", value_name = "DIR")]
    directory: PathBuf,
    /// Remove this model, or what has arrived of it, by the name of its directory in models/
    #[arg(long, value_name = "KEY")]
    remove: Option<String>,
    /// Keep this model until it is unpinned, even if its room is needed
    #[arg(long, value_name = "KEY", conflicts_with = "remove")]
    pin: Option<String>,
    /// Take back --pin
    #[arg(long, value_name = "KEY", conflicts_with_all = ["remove", "pin"])]
    unpin: Option<String>,
    /// Record that this model was in use until now
    #[arg(long, value_name = "KEY", conflicts_with_all = ["remove", "pin", "unpin"])]
    used: Option<String>,
    /// Print what there is as JSON
    #[arg(long)]
    json: bool,
}

/// What is told of a stored model.
fn told(stored: Stored) -> StoredModel {
    let Stored {
        key,
        about,
        bytes,
        shared_bytes,
        used,
        is_in_use,
        is_pinned,
        directory,
    } = stored;
    let seconds = |time: SystemTime| Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs());
    let verified_at_s = about.as_ref().and_then(|about| about.verified_at_s);
    let (source, commit, sha256) = match about {
        Some(about) => (Some(about.source), about.commit, about.sha256),
        None => (None, None, None),
    };
    StoredModel {
        key: key.to_string(),
        source,
        commit,
        sha256,
        bytes,
        shared_bytes,
        partial: None,
        used_at_s: used.and_then(seconds),
        verified_at_s,
        in_use: is_in_use,
        pinned: is_pinned,
        directory,
    }
}

/// What is told of a download that is not complete; `cache` is where it will be.
fn told_unfinished(unfinished: Unfinished, cache: &Cache) -> StoredModel {
    let Unfinished {
        key,
        begun,
        bytes,
        shared_bytes,
        total_bytes,
        is_running,
    } = unfinished;
    let (source, commit) = match begun {
        Some(begun) => (Some(begun.source), begun.commit),
        None => (None, None),
    };
    StoredModel {
        key: key.to_string(),
        source,
        commit,
        sha256: None,
        bytes,
        shared_bytes,
        partial: Some(PartialModel {
            total_bytes,
            is_running,
        }),
        used_at_s: None,
        verified_at_s: None,
        in_use: false,
        pinned: false,
        directory: cache.directory(&key),
    }
}

/// Changes what one model's argument says, and prints those that are there.
pub(crate) fn run(args: &ModelsArgs) -> anyhow::Result<()> {
    let cache = Cache::new(&args.directory);
    let unfinished = cache.unfinished()?;
    let is_begun = |key: &Key| unfinished.iter().any(|it| it.key == *key);
    let key = |flag: &str, name: &str| {
        let is_there = |key: &Key| cache.model(key).is_some() || (flag == REMOVE && is_begun(key));
        let key = Key::parse(name).filter(is_there);
        key.with_context(|| {
            format!(
                "{flag} is {name:?}, and {} has no such model\n  name a directory of its models/",
                args.directory.display()
            )
        })
    };
    if let Some(name) = &args.remove {
        cache.forget(&key(REMOVE, name)?)?;
    }
    if let Some(name) = &args.pin {
        cache.pin(&key("--pin", name)?)?;
    }
    if let Some(name) = &args.unpin {
        cache.unpin(&key("--unpin", name)?)?;
    }
    if let Some(name) = &args.used {
        cache.note_use(&key("--used", name)?, SystemTime::now());
    }
    let mut models: Vec<StoredModel> = cache.stored()?.into_iter().map(told).collect();
    let unfinished = cache.unfinished()?.into_iter();
    models.extend(unfinished.map(|it| told_unfinished(it, &cache)));
    if args.json {
        return logging::print_data(&format!("{}\n", serde_json::to_string(&models)?));
    }
    let text: String = models
        .iter()
        .map(|model| {
            let source = model.source.as_deref().unwrap_or("unknown");
            let partial = if model.partial.is_some() {
                " partial"
            } else {
                ""
            };
            let bytes = format_bytes(model.bytes);
            format!("{} {bytes} {source}{partial}\n", model.key)
        })
        .collect();
    logging::print_data(&text)
}
