//! Which process this is, and what it shows to others.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{InferencePlanSpec, Pinning, PlanRank, PlanRole};
use hearth_transport::{Tls, TlsFiles, TlsNames};

/// Which place in which plan; shared by all roles.
#[derive(Args)]
pub(crate) struct PlaceArgs {
    /// The plan, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) plan: PathBuf,
    /// The rank of the plan that this process is, such as decode-0
    #[arg(long, value_name = "NAME")]
    pub(crate) rank: String,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Seconds that requests in flight get to finish after SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub(crate) grace: u32,
    /// End when the process that started this one ends
    #[arg(long, hide = true)]
    pub(crate) with_parent: bool,
}

impl PlaceArgs {
    /// Reads the plan and finds the rank in it.
    ///
    /// # Errors
    /// A plan that cannot be read, a rank that is not in it or has another role.
    pub(crate) fn find(&self, role: PlanRole) -> anyhow::Result<(InferencePlanSpec, PlanRank)> {
        if self.with_parent {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
                .context("the kernel does not tell of the parent's end")?;
        }
        let text = std::fs::read(&self.plan)
            .with_context(|| format!("--plan {} cannot be read", self.plan.display()))?;
        let plan: InferencePlanSpec = serde_json::from_slice(&text).with_context(|| {
            format!("--plan {} is no plan of this version", self.plan.display())
        })?;
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

    /// Keeps this thread and those it starts on the rank's CPUs, where the plan pins it, and logs what the system gave.
    ///
    /// # Errors
    /// CPUs that this process may not use.
    pub(crate) fn bind(&self, rank: &PlanRank) -> anyhow::Result<()> {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        if rank.pinning != Pinning::None && !rank.cpus.is_empty() {
            let mut set = CpuSet::new();
            rank.cpus.iter().for_each(|&cpu| set.set(cpu as usize));
            sched_setaffinity(None, &set).with_context(|| {
                format!(
                    "{} cannot run on CPUs {:?} of the plan\n  plan again on this machine as it is now",
                    rank.name, rank.cpus
                )
            })?;
        }
        let got = sched_getaffinity(None)?;
        let cpus: Vec<usize> = (0..CpuSet::MAX_CPU)
            .filter(|&cpu| got.is_set(cpu))
            .collect();
        tracing::info!(rank = rank.name, pinning = ?rank.pinning, planned = ?rank.cpus, ?cpus, numa = ?rank.numa_nodes, "CPUs");
        Ok(())
    }
}

/// The certificates of a process.
#[derive(Args)]
pub(crate) struct TlsArgs {
    /// Directory with tls.crt, tls.key and ca.crt: speak mutual TLS with the other processes. Read again when it changes
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// DNS name that certificates of the others must carry, whatever their address (default: a worker's is its address)
    #[arg(long, value_name = "NAME", requires = "tls_dir")]
    tls_name: Option<String>,
}

impl TlsArgs {
    /// The certificates of `--tls-dir`.
    ///
    /// # Errors
    /// A file that is missing or is no certificate, by name.
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
