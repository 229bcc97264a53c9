//! Identity of this process, and its certificates.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{
    InferencePlanSpec, MOST_IDLE_CHUNK_TOKENS, PlanRank, PlanRole, TLS_DIRECTORY, read_versioned,
};
use hearth_transport::{Tls, TlsFiles, TlsNames};

use super::binding::Binding;
use crate::signals;

/// Which place in which plan; shared by all roles.
#[derive(Args)]
pub(crate) struct ProcessArgs {
    /// The plan, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: PathBuf,
    /// This process's rank in the plan, such as decode-0
    #[arg(long, value_name = "NAME")]
    pub(crate) rank: String,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Seconds for requests in flight to finish after SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub(crate) grace: u32,
    /// Milliseconds between looks at the CPUs that the system allows
    #[arg(
        long,
        hide = true,
        env = "HEARTH_PLACEMENT_INTERVAL_MS",
        default_value_t = 10_000
    )]
    placement_interval_ms: u64,
    /// End when the parent process ends, which is this one
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) with_parent: Option<u32>,
}

impl ProcessArgs {
    /// Reads the plan and finds this rank in it.
    ///
    /// # Errors
    /// An error if the plan cannot be read, or the rank is not in it or has another role.
    pub(crate) fn find(&self, role: PlanRole) -> anyhow::Result<(InferencePlanSpec, PlanRank)> {
        if let Some(parent) = self.with_parent {
            signals::end_with_parent(parent)?;
        }
        let plan = read_plan(&self.plan)?;
        let Some(rank) = plan.rank(&self.rank).cloned() else {
            let names: Vec<&str> = plan.ranks.iter().map(|rank| rank.name.as_str()).collect();
            bail!(
                "--rank is {:?}, which is not in the plan\n  it has {}",
                self.rank,
                names.join(", ")
            );
        };
        if rank.role != role {
            bail!(
                "--rank {} is a {} rank\n  run: hearth-worker {0}",
                rank.name,
                rank.role.as_str()
            );
        }
        Ok((plan, rank))
    }

    /// Binds this process to CPUs for as long as it runs, see [`Binding::start`].
    ///
    /// # Errors
    /// An error if the system does not report the CPUs.
    pub(super) fn bind(&self, rank: &PlanRank) -> anyhow::Result<Arc<Binding>> {
        Binding::start(rank, Duration::from_millis(self.placement_interval_ms))
    }
}

/// Reads the plan that a process was given.
///
/// # Errors
/// An error that names the file if it cannot be read, or is none that this version can carry out.
pub(super) fn read_plan(file: &Path) -> anyhow::Result<InferencePlanSpec> {
    let text =
        std::fs::read(file).with_context(|| format!("--plan {} cannot be read", file.display()))?;
    let plan: InferencePlanSpec = read_versioned(&text)
        .with_context(|| format!("--plan {} cannot be carried out", file.display()))?;
    for rank in &plan.ranks {
        if let Some(tokens) = rank.idle_chunk_tokens
            && !(1..=MOST_IDLE_CHUNK_TOKENS).contains(&tokens)
        {
            bail!(
                "--plan {}: idleChunkTokens of {} is {tokens}\n  \
                 write 1 to {MOST_IDLE_CHUNK_TOKENS}, or remove it",
                file.display(),
                rank.name
            );
        }
    }
    Ok(plan)
}

/// The certificates of a process.
#[derive(Args)]
pub(crate) struct TlsArgs {
    /// Directory with tls.crt, tls.key and ca.crt: use mutual TLS with the other processes. Reloaded when it changes
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// DNS name that certificates of the others must carry, whatever their address (default: a worker's is its address)
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    tls_name: Option<String>,
}

impl TlsArgs {
    /// These arguments again, for another process.
    pub(super) fn arguments(&self) -> Vec<String> {
        let directory = self.tls_dir.as_ref().map(|dir| dir.display().to_string());
        let flags = [
            ("--tls-dir", directory),
            ("--tls-name", self.tls_name.clone()),
        ];
        let given = flags
            .into_iter()
            .filter_map(|(flag, value)| Some([flag.to_owned(), value?]));
        given.flatten().collect()
    }

    /// These arguments, or those of a Pod of the deployment that carries `name`.
    pub(super) fn or_in_pod(&self, name: &str) -> Self {
        let directory = self.tls_dir.clone();
        Self {
            tls_dir: directory.or_else(|| Some(PathBuf::from(TLS_DIRECTORY))),
            tls_name: self.tls_name.clone().or_else(|| Some(name.to_owned())),
        }
    }

    /// Reads the certificates in `--tls-dir`.
    ///
    /// # Errors
    /// An error that names the file if it is missing or not a certificate.
    pub(crate) fn read(&self) -> anyhow::Result<Option<Tls>> {
        let Some(directory) = &self.tls_dir else {
            return Ok(None);
        };
        let files = TlsFiles {
            cert: directory.join("tls.crt"),
            key: directory.join("tls.key"),
            ca: directory.join("ca.crt"),
            names: match &self.tls_name {
                Some(name) => TlsNames::shared(name),
                None => TlsNames::default(),
            },
        };
        Ok(Some(Tls::read(&files)?))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn plan() -> Value {
        json!({
            "generation": 1,
            "deployment": {"name": "demo", "namespace": "default"},
            "strategy": "Hybrid",
            "model": {
                "servedName": "demo", "path": "/m", "source": "x", "architecture": "x", "parameterCount": 1,
                "weightBytes": 1, "contextLength": 1, "layers": 1, "kvBytesPerToken": 1, "dtype": "BF16",
            },
            "ranks": [{
                "name": "decode-0", "role": "Decode", "index": 0, "node": "a", "cpus": [], "numaNodes": [], "threads": 1,
                "pinning": "None", "device": "cpu", "maxBatch": 1, "chunkTokens": 1, "scratchBytes": 1,
            }],
            "routing": {"chunkedBelowTokens": 1, "maxQueue": 1, "queueTimeoutMs": 1},
            "predicted": {"ttftMs": 1.0, "ttftPromptTokens": 1, "tpotMs": 1.0, "tokensPerSecond": 1.0},
            "why": [],
            "notChosen": [],
        })
    }

    fn find(plan: &Value) -> anyhow::Result<(InferencePlanSpec, PlanRank)> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), plan.to_string()).unwrap();
        let place = ProcessArgs {
            plan: file.path().to_owned(),
            rank: "decode-0".to_owned(),
            tls: TlsArgs {
                tls_dir: None,
                tls_name: None,
            },
            grace: 1,
            placement_interval_ms: 10_000,
            with_parent: None,
        };
        place.find(PlanRole::Decode)
    }

    #[test]
    fn what_a_newer_operator_adds_to_a_plan_is_passed_over() {
        let mut plan = plan();
        plan["fairness"] = json!({"by": "user"});
        plan["model"]["revision"] = json!("abc");
        plan["ranks"][0]["window"] = json!([0, 5]);
        plan["routing"]["weights"] = json!([1]);
        plan["minVersion"] = json!(hearth_crds::READER_VERSION);
        assert_eq!(find(&plan).unwrap().1.name, "decode-0");
    }

    #[test]
    fn a_pass_that_no_member_has_room_for_is_refused_with_what_to_write() {
        let mut plan = plan();
        for (tokens, is_taken) in [(1, true), (8192, true), (0, false), (8193, false)] {
            plan["ranks"][0]["idleChunkTokens"] = json!(tokens);
            let words = find(&plan).map_or_else(|error| format!("{error:#}"), |_| String::new());
            let is_named = words.contains(&format!("idleChunkTokens of decode-0 is {tokens}"))
                && words.contains("write 1 to 8192, or remove it");
            assert_eq!(is_named, !is_taken, "{tokens}: {words}");
        }
    }

    #[test]
    fn a_plan_that_needs_a_newer_worker_is_refused_with_what_to_do() {
        let mut plan = plan();
        plan["minVersion"] = json!(hearth_crds::READER_VERSION + 1);
        plan["strategy"] = json!("Carousel");
        let words = format!("{:#}", find(&plan).unwrap_err());
        assert!(
            words.contains("minVersion is") && words.contains("image.workerTag"),
            "{words}"
        );
    }
}
