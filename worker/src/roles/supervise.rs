//! `hearth-worker supervise`: several ranks of a plan in one container, each a process of its own.
//!
//! A device plugin gives a GPU to one container alone, so ranks that share a GPU share the container. Each is restarted
//! by itself, and the others go on meanwhile. To the kubelet the container is ready while its first rank is, once every
//! rank has been: the gateway finds out about each rank at its own port. A lost device ends all of them, with its exit
//! code; so does a rank that cannot start, as the operator learns the cause from the container's end.

use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{DEVICE_LOST_EXIT_CODE, InferencePlanSpec, PlanRole};
use hearth_transport::Health;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::process::{TlsArgs, read_plan};
use crate::logging::{print_line, say};
use crate::lost::DeviceLost;
use crate::signals;

/// First delay before a rank is restarted; doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(100);
/// Longest delay before a rank is restarted.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// Ends in a row without having been ready after which a rank is given up.
const MAX_FAILED_STARTS: u32 = 3;
/// Silence after which a ready rank, which reports every second, is killed: as long as a liveness probe waits.
const SILENCE: Duration = Duration::from_secs(60);
/// Time beyond the grace period for processes to end.
const END_MARGIN: Duration = Duration::from_secs(4);
/// Time for the other ranks to end whose device is lost: what they compute is lost with it.
const LOST_GRACE: Duration = Duration::from_secs(5);
/// Time limit for reading the remaining output of a process that has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Prefix of the line in which a process says why it ends.
const ERROR: &str = "error: ";
/// Maximum number of lines of an error that are kept.
const ERROR_LINES: usize = 6;

/// Arguments of `supervise`.
#[derive(Args)]
pub(crate) struct SuperviseArgs {
    /// The plan, as JSON
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// A worker of the plan, such as decode-0; give one for each. Probes see whether the first one is ready
    #[arg(long = "rank", value_name = "NAME", required = true)]
    ranks: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Seconds for requests in flight to finish after SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    grace: u32,
    /// Address of plain gRPC health for probes, open while the ranks load: service "" is ready, "live" is alive
    #[arg(long, value_name = "ADDRESS")]
    health: Option<String>,
}

/// Keeps the ranks running until this process is told to stop, a device is lost or a rank cannot be started.
///
/// # Errors
/// [`DeviceLost`], or the error of the rank that cannot be started.
pub(crate) fn run(args: &SuperviseArgs) -> anyhow::Result<()> {
    let plan = read_plan(&args.plan)?;
    let ranks = ranks(args, &plan)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(supervise(args, ranks))
}

/// The ranks with the commands that run them.
fn ranks(args: &SuperviseArgs, plan: &InferencePlanSpec) -> anyhow::Result<Vec<Rank>> {
    let program = std::env::current_exe().context("this program cannot be found")?;
    let plan_file = args.plan.display().to_string();
    let mut ranks: Vec<Rank> = Vec::new();
    for name in &args.ranks {
        let role = plan.rank(name).map(|rank| rank.role);
        let Some(role) = role.filter(|role| *role != PlanRole::Gateway) else {
            bail!("--rank is {name:?}, which is not a worker of the plan");
        };
        if ranks.iter().any(|other| other.name == *name) {
            bail!("--rank {name} is given twice\n  name each worker once");
        }
        let grace = args.grace.to_string();
        let own = [
            role.as_str(),
            "--plan",
            &plan_file,
            "--rank",
            name,
            "--grace",
            &grace,
            "--with-parent",
        ];
        let mut arguments: Vec<String> = own.map(str::to_owned).to_vec();
        arguments.extend(args.tls.arguments());
        ranks.push(Rank {
            index: ranks.len(),
            name: name.clone(),
            program: program.clone(),
            arguments,
        });
    }
    Ok(ranks)
}

/// A rank with the command that runs it.
struct Rank {
    index: usize,
    name: String,
    program: PathBuf,
    arguments: Vec<String>,
}

/// News about a rank.
enum Event {
    /// The rank of this index is ready, or no longer.
    Ready(usize, bool),
    /// The device of a rank is lost, with the rank's error.
    Lost(String),
    /// A rank cannot be started, with its error.
    GivenUp(String),
}

async fn supervise(args: &SuperviseArgs, ranks: Vec<Rank>) -> anyhow::Result<()> {
    let health = Health::starting().await;
    let address = args.health.as_deref();
    let _probes = address.map(|address| health.listen(address)).transpose()?;
    let mut readiness = Readiness::of(ranks.len());
    let (sender, mut events) = mpsc::unbounded_channel();
    let (stop, stopping) = watch::channel(false);
    let mut tasks = JoinSet::new();
    for rank in ranks {
        tasks.spawn(keep(rank, sender.clone(), stopping.clone()));
    }
    let mut told = pin!(signals::termination());
    let grace = Duration::from_secs(u64::from(args.grace));
    let (outcome, grace) = loop {
        tokio::select! {
            () = &mut told => break (Ok(()), grace),
            event = events.recv() => match event {
                Some(Event::Ready(index, is_ready)) => {
                    readiness.hear(index, is_ready);
                    health.set_ready(readiness.is_ready()).await;
                }
                Some(Event::Lost(why)) => break (Err(DeviceLost(why).into()), LOST_GRACE),
                Some(Event::GivenUp(why)) => break (Err(anyhow::Error::msg(why)), grace),
                None => break (Ok(()), grace),
            },
        }
    };
    health.end().await;
    stop.send_replace(true);
    let ended = async { while tasks.join_next().await.is_some() {} };
    if timeout(grace + END_MARGIN, ended).await.is_err() {
        say("killing the processes that have not ended in time");
        tasks.shutdown().await;
    }
    outcome
}

/// What probes are told.
struct Readiness {
    now: Vec<bool>,
    /// Whether each rank has ever been ready.
    ever: Vec<bool>,
}

impl Readiness {
    fn of(ranks: usize) -> Self {
        Self {
            now: vec![false; ranks],
            ever: vec![false; ranks],
        }
    }

    fn hear(&mut self, index: usize, is_ready: bool) {
        self.now[index] = is_ready;
        self.ever[index] |= is_ready;
    }

    /// Whether the first rank is ready now, and the others have been: their restarts do not take it out of service.
    fn is_ready(&self) -> bool {
        self.now.first() == Some(&true) && self.ever.iter().all(|ever| *ever)
    }
}

/// Keeps a rank running until `stop`, its device is lost, or it cannot be started.
async fn keep(rank: Rank, events: mpsc::UnboundedSender<Event>, mut stop: watch::Receiver<bool>) {
    let name = &rank.name;
    let tell = |event| {
        let _ = events.send(event);
    };
    let (mut pause, mut failed_starts) = (MIN_PAUSE, 0);
    loop {
        let end = match spawn(&rank) {
            Ok(child) => follow(child, &rank, &tell, &mut stop).await,
            Err(error) => End {
                how: format!("could not be started: {error:#}"),
                ..End::default()
            },
        };
        tell(Event::Ready(rank.index, false));
        if *stop.borrow() {
            return;
        }
        let how = match &end.why {
            Some(why) => why.clone(),
            None => end.how.clone(),
        };
        if end.code == Some(DEVICE_LOST_EXIT_CODE.into()) {
            return tell(Event::Lost(format!("{name}: {how}")));
        }
        if end.was_ready {
            (pause, failed_starts) = (MIN_PAUSE, 0);
        } else {
            failed_starts += 1;
        }
        if failed_starts >= MAX_FAILED_STARTS {
            return tell(Event::GivenUp(format!("{name}: {how}")));
        }
        say(format_args!(
            "{name} {}, and is started again in {} ms",
            end.how,
            pause.as_millis()
        ));
        tokio::select! {
            () = sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

fn spawn(rank: &Rank) -> std::io::Result<Child> {
    Command::new(&rank.program)
        .args(&rank.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
}

/// End of a process.
#[derive(Default)]
struct End {
    /// Description in words.
    how: String,
    /// The error that it wrote last, if any.
    why: Option<String>,
    /// Whether it had been ready.
    was_ready: bool,
    /// Its exit code; `None` if it has none.
    code: Option<i32>,
}

/// Follows a process until it ends, and passes its output on.
async fn follow(
    mut child: Child,
    rank: &Rank,
    tell: &impl Fn(Event),
    stop: &mut watch::Receiver<bool>,
) -> End {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let signal = |signal| {
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
    };
    let errors = child.stderr.take();
    let errors = tokio::spawn(pass_on(rank.name.clone(), errors));
    let mut reports = child.stdout.take().map(|pipe| BufReader::new(pipe).lines());
    let (mut was_ready, mut is_stopped) = (false, false);
    let mut heard = Instant::now();
    let status = loop {
        let report = async {
            match reports.as_mut() {
                Some(reports) => reports.next_line().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => break status,
            () = sleep_until(heard + SILENCE), if was_ready => {
                say(format_args!("{}: silent for {} s, and is killed", rank.name, SILENCE.as_secs()));
                heard = Instant::now();
                signal(Signal::KILL);
            }
            _ = stop.wait_for(|stop| *stop), if !is_stopped => {
                is_stopped = true;
                signal(Signal::TERM);
            }
            report = report => match report {
                Ok(Some(line)) => {
                    heard = Instant::now();
                    match event_of(&line).as_deref() {
                        Some("alive") => continue,
                        Some("ready") => {
                            was_ready = true;
                            tell(Event::Ready(rank.index, true));
                        }
                        Some("draining") => tell(Event::Ready(rank.index, false)),
                        _ => {}
                    }
                    print_line(format_args!("{}: {line}", rank.name));
                }
                Ok(None) | Err(_) => reports = None,
            },
        }
    };
    let why = timeout(LAST_WORDS, errors).await;
    End {
        how: describe(status.as_ref().ok()),
        why: why.ok().and_then(Result::ok).flatten(),
        was_ready,
        code: status.ok().and_then(|status| status.code()),
    }
}

/// The name of the event that a line reports; `None` for other output.
fn event_of(line: &str) -> Option<String> {
    let report: serde_json::Value = serde_json::from_str(line).ok()?;
    report.get("event")?.as_str().map(str::to_owned)
}

/// Passes a process's log on, line by line under its rank's name; returns the last error in it.
async fn pass_on(rank: String, log: Option<impl AsyncRead + Unpin>) -> Option<String> {
    let mut lines = BufReader::new(log?).lines();
    let mut error: Vec<String> = Vec::new();
    while let Ok(Some(line)) = lines.next_line().await {
        say(format_args!("{rank}: {line}"));
        if let Some(first) = line.strip_prefix(ERROR) {
            error = vec![first.to_owned()];
        } else if (1..ERROR_LINES).contains(&error.len()) {
            error.push(line);
        }
    }
    (!error.is_empty()).then(|| error.join("\n"))
}

fn describe(status: Option<&ExitStatus>) -> String {
    use std::os::unix::process::ExitStatusExt;
    let status = status.map(|status| (status.code(), status.signal()));
    match status {
        Some((Some(code), _)) => format!("ended with exit code {code}"),
        Some((None, Some(signal))) => format!("was killed by signal {signal}"),
        Some((None, None)) | None => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_see_the_first_rank_once_all_have_been_ready() {
        let mut readiness = Readiness::of(2);
        readiness.hear(0, true);
        assert!(!readiness.is_ready(), "the second is still loading");
        readiness.hear(1, true);
        assert!(readiness.is_ready());
        readiness.hear(1, false);
        assert!(readiness.is_ready(), "the second is being restarted");
        readiness.hear(0, false);
        assert!(!readiness.is_ready());
    }
}
