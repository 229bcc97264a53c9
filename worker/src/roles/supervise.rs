//! `hearth-worker supervise`: several ranks of a plan in one container, each a process of its own.
//!
//! A device plugin gives a GPU to one container alone, so ranks that share a GPU share the container. Each is restarted
//! by itself, however often, and the others go on meanwhile. To the kubelet the container is ready while its first rank
//! is, once every rank has been: the gateway finds out about each rank at its own port. A lost device ends all of them,
//! with its exit code. So does a rank that cannot start before all have been ready, as the operator learns the cause from
//! the container's end.

use std::path::PathBuf;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hearth_crds::{
    DEVICE_LOST_EXIT_CODE, END_MARGIN, HUNG_AFTER, InferencePlanSpec, LAST_WORDS, LastError,
    MAX_FAILED_STARTS, PlanRole, Restarts, WorkerReport, how_it_ended,
};
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

/// Silence after which a ready rank, which reports every second, is killed: as long as a liveness probe waits.
const SILENCE: Duration = Duration::from_secs(60);
/// Time for the other ranks to end whose device is lost: what they compute is lost with it.
const LOST_GRACE: Duration = Duration::from_secs(5);

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
        let (grace, parent) = (args.grace.to_string(), std::process::id().to_string());
        let own = [
            role.as_str(),
            "--plan",
            &plan_file,
            "--rank",
            name,
            "--grace",
            &grace,
            "--with-parent",
            &parent,
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

/// How far the container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Some rank has never been ready.
    Starting,
    /// Every rank has been ready: each is restarted however often it fails.
    Serving,
    /// The processes are to end.
    Ending,
}

async fn supervise(args: &SuperviseArgs, ranks: Vec<Rank>) -> anyhow::Result<()> {
    let health = Health::starting().await;
    let address = args.health.as_deref();
    let _probes = address.map(|address| health.listen(address)).transpose()?;
    let mut readiness = Readiness::of(ranks.len());
    let (sender, mut events) = mpsc::unbounded_channel();
    let (phase, phases) = watch::channel(Phase::Starting);
    let mut tasks = JoinSet::new();
    for rank in ranks {
        tasks.spawn(keep(rank, sender.clone(), phases.clone()));
    }
    let mut told = pin!(signals::termination());
    let grace = Duration::from_secs(u64::from(args.grace));
    let (outcome, grace) = loop {
        tokio::select! {
            () = &mut told => break (Ok(()), grace),
            Some(event) = events.recv() => match event {
                Event::Ready(index, is_ready) => {
                    readiness.hear(index, is_ready);
                    if readiness.all_have_been() {
                        phase.send_replace(Phase::Serving);
                    }
                    health.set_ready(readiness.is_ready()).await;
                }
                Event::Lost(why) => break (Err(DeviceLost(why).into()), LOST_GRACE),
                Event::GivenUp(why) => break (Err(anyhow::Error::msg(why)), grace),
            },
        }
    };
    health.end().await;
    phase.send_replace(Phase::Ending);
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
        self.now.first() == Some(&true) && self.all_have_been()
    }

    fn all_have_been(&self) -> bool {
        self.ever.iter().all(|ever| *ever)
    }
}

/// Keeps a rank running until the container ends, its device is lost, or it cannot be started at first.
async fn keep(rank: Rank, events: mpsc::UnboundedSender<Event>, mut phase: watch::Receiver<Phase>) {
    let name = &rank.name;
    let tell = |event| {
        let _ = events.send(event);
    };
    let (mut restarts, mut failed_starts) = (Restarts::default(), 0);
    loop {
        let end = match spawn(&rank) {
            Ok(child) => follow(child, &rank, &tell, &mut phase).await,
            Err(error) => End {
                how: format!("not started: {error:#}"),
                ..End::default()
            },
        };
        tell(Event::Ready(rank.index, false));
        let now = *phase.borrow();
        if now == Phase::Ending {
            return;
        }
        let how = match &end.why {
            Some(why) => why.clone(),
            None => end.how.clone(),
        };
        if end.code == Some(DEVICE_LOST_EXIT_CODE.into()) {
            return tell(Event::Lost(format!("{name}: {how}")));
        }
        failed_starts = if end.served.is_some() {
            0
        } else {
            failed_starts + 1
        };
        if now == Phase::Starting && failed_starts >= MAX_FAILED_STARTS {
            return tell(Event::GivenUp(format!("{name}: {how}")));
        }
        let pause = restarts.pause(end.served.unwrap_or_default());
        say(format_args!(
            "{name}: {}; it is started again in {} ms",
            end.how,
            pause.as_millis()
        ));
        tokio::select! {
            () = sleep(pause) => {}
            _ = phase.wait_for(|phase| *phase == Phase::Ending) => return,
        }
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
    /// Time since it became ready; `None` if it never did.
    served: Option<Duration>,
    /// Its exit code; `None` if it has none.
    code: Option<i32>,
}

/// A process's state by its reports.
struct Reported {
    /// Time at which it became ready.
    ready_at: Option<Instant>,
    /// Whether it takes requests, by its last word on that.
    takes_requests: bool,
    /// Time of its last report.
    heard: Instant,
    is_silent: bool,
}

impl Reported {
    fn begin() -> Self {
        Self {
            ready_at: None,
            takes_requests: false,
            heard: Instant::now(),
            is_silent: false,
        }
    }

    fn hear(&mut self, report: Option<&WorkerReport>) {
        self.heard = Instant::now();
        self.is_silent = false;
        match report {
            Some(WorkerReport::Ready { .. }) => {
                self.ready_at.get_or_insert(self.heard);
                self.takes_requests = true;
            }
            Some(WorkerReport::Healthy) => self.takes_requests = true,
            Some(WorkerReport::Unhealthy | WorkerReport::Draining { .. }) => {
                self.takes_requests = false;
            }
            _ => {}
        }
    }

    fn is_ready(&self) -> bool {
        self.takes_requests && !self.is_silent
    }
}

/// Follows a process until it ends, and passes its output on.
async fn follow(
    mut child: Child,
    rank: &Rank,
    tell: &impl Fn(Event),
    phase: &mut watch::Receiver<Phase>,
) -> End {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let signal = |signal| {
        if let Some(pid) = pid {
            let _ = kill_process(pid, signal);
        }
    };
    let errors = child.stderr.take();
    let errors = tokio::spawn(pass_on(rank.name.clone(), errors));
    let mut lines = child
        .stdout
        .take()
        .map(|pipe| BufReader::new(pipe).split(b'\n'));
    let mut reported = Reported::begin();
    let (mut was_ready, mut is_stopped, mut is_killed) = (false, false, false);
    let status = loop {
        let line = async {
            match lines.as_mut() {
                Some(lines) => lines.next_segment().await,
                None => std::future::pending().await,
            }
        };
        let has_served = reported.ready_at.is_some();
        tokio::select! {
            status = child.wait() => break status,
            () = sleep_until(reported.heard + HUNG_AFTER), if has_served && !reported.is_silent => {
                reported.is_silent = true;
            }
            () = sleep_until(reported.heard + SILENCE), if has_served && !is_killed => {
                say(format_args!("{}: silent for {} s, and is killed", rank.name, SILENCE.as_secs()));
                is_killed = true;
                signal(Signal::KILL);
            }
            _ = phase.wait_for(|phase| *phase == Phase::Ending), if !is_stopped => {
                is_stopped = true;
                signal(Signal::TERM);
            }
            line = line => match line {
                Ok(Some(line)) => {
                    let line = String::from_utf8_lossy(&line);
                    let report = WorkerReport::read(&line);
                    reported.hear(report.as_ref());
                    if report != Some(WorkerReport::Alive) {
                        print_line(format_args!("{}: {line}", rank.name));
                    }
                }
                Ok(None) | Err(_) => lines = None,
            },
        }
        let is_ready = reported.is_ready();
        if std::mem::replace(&mut was_ready, is_ready) != is_ready {
            tell(Event::Ready(rank.index, is_ready));
        }
    };
    let why = timeout(LAST_WORDS, errors).await;
    End {
        how: how_it_ended(status.as_ref().ok()),
        why: why.ok().and_then(Result::ok).flatten(),
        served: reported.ready_at.map(|at| at.elapsed()),
        code: status.ok().and_then(|status| status.code()),
    }
}

/// Passes a process's log on, line by line under its rank's name; returns the last error in it.
async fn pass_on(rank: String, log: Option<impl AsyncRead + Unpin>) -> Option<String> {
    let mut lines = BufReader::new(log?).split(b'\n');
    let mut error = LastError::default();
    while let Ok(Some(line)) = lines.next_segment().await {
        let line = String::from_utf8_lossy(&line);
        say(format_args!("{rank}: {line}"));
        error.hear(&line);
    }
    error.words()
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

    #[tokio::test]
    async fn a_process_takes_requests_until_it_says_otherwise_or_says_nothing() {
        let mut reported = Reported::begin();
        let ready = WorkerReport::Ready {
            endpoint: "127.0.0.1:1".to_owned(),
            device: "cpu".to_owned(),
        };
        let mut after = |report: &WorkerReport| {
            reported.hear(Some(report));
            reported.is_ready()
        };
        assert!(!after(&WorkerReport::Loading { percent: 3 }));
        assert!(after(&ready) && after(&WorkerReport::Alive));
        assert!(
            !after(&WorkerReport::Unhealthy) && !after(&WorkerReport::Alive),
            "its engine has failed"
        );
        assert!(after(&WorkerReport::Healthy));
        let draining = WorkerReport::Draining { choices: None };
        assert!(!after(&draining) && !after(&WorkerReport::Alive));
        reported.hear(Some(&ready));
        reported.is_silent = true;
        assert!(!reported.is_ready());
        reported.hear(Some(&WorkerReport::Alive));
        assert!(reported.is_ready());
    }
}
