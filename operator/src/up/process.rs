//! One worker process: started, followed through its reports, restarted when it dies.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use hearth_crds::{
    DEVICE_LOST_EXIT_CODE, HUNG_AFTER, LAST_WORDS, LastError, Restarts, StreamedPrompts,
    WorkerReport, how_it_ended,
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

/// Silence after which a hung process is considered lost and is killed.
const SILENCE: Duration = Duration::from_secs(20);
/// Silence of a process that does not serve yet after which that is said; it may still go on.
pub(crate) const LATE: Duration = Duration::from_secs(10);
/// Exit code of a worker that rejects its arguments.
const USAGE: i32 = 2;

/// Command of a rank's process.
#[derive(Clone, Debug)]
pub(crate) struct ProcessSpec {
    /// Name of the rank.
    pub(crate) rank: String,
    /// `hearth-worker`.
    pub(crate) program: PathBuf,
    /// Its arguments.
    pub(crate) arguments: Vec<String>,
    /// Log file for standard error.
    pub(crate) log: PathBuf,
}

/// An event of a process.
#[derive(Debug)]
pub(crate) struct ProcessEvent {
    /// Name of the rank.
    pub(crate) rank: String,
    /// The event itself.
    pub(crate) kind: ProcessEventKind,
}

/// Kinds of process events.
#[derive(Debug)]
pub(crate) enum ProcessEventKind {
    /// It was started with this process id.
    Started(u32),
    /// It is mapping its weights; in percent.
    Loading(u32),
    /// It is ready to serve.
    Ready,
    /// It does not serve yet, and has not reported for [`LATE`] (true), or reports again.
    Late(bool),
    /// It has read prompts whose experts were streamed.
    Streamed(StreamedPrompts),
    /// It has stopped reporting (true), or reports again.
    Hung(bool),
    /// Its engine has failed and it takes no requests (true), or has recovered.
    Unhealthy(bool),
    /// It ended without being asked to, and is restarted after the delay.
    Died {
        /// Description in words: `killed by signal 9`.
        how: String,
        /// The error that it printed, if any.
        why: Option<String>,
        /// Delay before the restart.
        pause: Duration,
        /// Whether it had been ready since its start.
        was_ready: bool,
        /// Whether it rejected its arguments, and so will again.
        is_refused: bool,
        /// Whether its device no longer answers.
        is_lost: bool,
    },
    /// It ends, as it was told to; the gateway with the number of choices that have not ended.
    Draining(Option<u64>),
    /// Number of answers that were unfinished when the grace period ended.
    CutOff(u64),
    /// It ended after being asked to.
    Stopped,
}

/// State of a process that the supervisor wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Running, and restarted if it ends.
    Running,
    /// Stopped after what is in flight has finished.
    Stopped,
    /// Stopped immediately.
    Killed,
}

/// Keeps a process running until `wanted` changes.
pub(crate) async fn keep(
    spec: ProcessSpec,
    events: mpsc::UnboundedSender<ProcessEvent>,
    mut wanted: watch::Receiver<Wanted>,
) {
    let tell = |kind| {
        let _ = events.send(ProcessEvent {
            rank: spec.rank.clone(),
            kind,
        });
    };
    let mut restarts = Restarts::default();
    loop {
        let log_start = std::fs::metadata(&spec.log).map_or(0, |log| log.len());
        let End { how, served, code } = match spawn(&spec) {
            Ok(child) => {
                tell(ProcessEventKind::Started(child.id().unwrap_or_default()));
                follow(child, &tell, &mut wanted).await
            }
            Err(error) => End {
                how: format!("not started: {error:#}"),
                served: None,
                code: None,
            },
        };
        if *wanted.borrow() != Wanted::Running {
            tell(ProcessEventKind::Stopped);
            return;
        }
        let pause = restarts.pause(served.unwrap_or_default());
        tell(ProcessEventKind::Died {
            how,
            why: last_error(&spec.log, log_start),
            pause,
            was_ready: served.is_some(),
            is_refused: code == Some(USAGE),
            is_lost: code == Some(DEVICE_LOST_EXIT_CODE.into()),
        });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = wanted.wait_for(|wanted| *wanted != Wanted::Running) => {
                tell(ProcessEventKind::Stopped);
                return;
            }
        }
    }
}

fn spawn(spec: &ProcessSpec) -> anyhow::Result<Child> {
    let log = open_log(&spec.log)?;
    Command::new(&spec.program)
        .args(&spec.arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        // Ctrl-C reaches only hearth, which then ends the processes in the right order.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("{} cannot be run", spec.program.display()))
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// End of a process.
struct End {
    /// Description in words.
    how: String,
    /// Time since it became ready; `None` if it never did.
    served: Option<Duration>,
    /// Its exit code; `None` if it has none.
    code: Option<i32>,
}

/// Follows a process until it ends.
async fn follow(
    mut child: Child,
    tell: &impl Fn(ProcessEventKind),
    wanted: &mut watch::Receiver<Wanted>,
) -> End {
    let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    let mut lines = child
        .stdout
        .take()
        .map(|stdout| BufReader::new(stdout).lines());
    let mut ready_at: Option<Instant> = None;
    let (mut is_silent, mut is_late, mut is_ended) = (false, false, false);
    let mut heard = Instant::now();
    loop {
        let line = async {
            match lines.as_mut() {
                Some(lines) => lines.next_line().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => {
                let how = if is_ended { format!("hung for {} s and was ended", SILENCE.as_secs()) } else { how_it_ended(status.as_ref().ok()) };
                if let Some(lines) = lines {
                    let _ = tokio::time::timeout(LAST_WORDS, last_words(lines, tell)).await;
                }
                let code = status.ok().and_then(|status| status.code());
                return End { how, served: ready_at.map(|at| at.elapsed()), code };
            }
            () = tokio::time::sleep_until(heard + HUNG_AFTER), if ready_at.is_some() && !is_silent => {
                is_silent = true;
                tell(ProcessEventKind::Hung(true));
            }
            () = tokio::time::sleep_until(heard + LATE), if ready_at.is_none() && !is_late => {
                is_late = true;
                tell(ProcessEventKind::Late(true));
            }
            () = tokio::time::sleep_until(heard + SILENCE), if ready_at.is_some() && !is_ended => {
                is_ended = true;
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            line = line => match line {
                Ok(Some(line)) => if pass_on(WorkerReport::read(&line), tell, &mut ready_at) {
                    heard = Instant::now();
                    if std::mem::take(&mut is_silent) {
                        tell(ProcessEventKind::Hung(false));
                    }
                    if std::mem::take(&mut is_late) {
                        tell(ProcessEventKind::Late(false));
                    }
                },
                Ok(None) | Err(_) => lines = None,
            },
            changed = wanted.changed() => {
                let signal = match (changed.is_ok(), *wanted.borrow()) {
                    (true, Wanted::Running) => continue,
                    (true, Wanted::Stopped) => Signal::TERM,
                    (false, _) | (true, Wanted::Killed) => Signal::KILL,
                };
                if let Some(pid) = pid {
                    let _ = kill_process(pid, signal);
                }
            }
        }
    }
}

/// Tells what a process has reported; returns whether it is a sign of life.
fn pass_on(
    report: Option<WorkerReport>,
    tell: &impl Fn(ProcessEventKind),
    ready_at: &mut Option<Instant>,
) -> bool {
    match report {
        Some(WorkerReport::Alive) => return true,
        Some(WorkerReport::Ready { .. }) => {
            ready_at.get_or_insert_with(Instant::now);
            tell(ProcessEventKind::Ready);
            return true;
        }
        Some(WorkerReport::Loading { percent }) => {
            tell(ProcessEventKind::Loading(percent));
            return true;
        }
        Some(WorkerReport::CutOff { answers }) => tell(ProcessEventKind::CutOff(answers)),
        Some(WorkerReport::Streamed(streamed)) => tell(ProcessEventKind::Streamed(streamed)),
        Some(WorkerReport::Unhealthy) => tell(ProcessEventKind::Unhealthy(true)),
        Some(WorkerReport::Healthy) => tell(ProcessEventKind::Unhealthy(false)),
        Some(WorkerReport::Draining { choices }) => tell(ProcessEventKind::Draining(choices)),
        None => {}
    }
    false
}

/// Reads the remaining output of a process that has ended.
async fn last_words(mut lines: Lines<BufReader<ChildStdout>>, tell: &impl Fn(ProcessEventKind)) {
    while let Ok(Some(line)) = lines.next_line().await {
        let report = WorkerReport::read(&line);
        if let Some(WorkerReport::CutOff { .. } | WorkerReport::Draining { .. }) = report {
            pass_on(report, tell, &mut None);
        }
    }
}

/// Returns the last error that a process wrote after `start` of its log, with the lines that follow.
fn last_error(path: &Path, start: u64) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    let own = bytes.get(usize::try_from(start).ok()?..)?;
    let text = String::from_utf8_lossy(own);
    let mut error = LastError::default();
    text.lines().for_each(|line| error.hear(line));
    error.words()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock goes on while nothing happens.
    #[tokio::test(start_paused = true)]
    async fn a_process_that_neither_serves_nor_reports_is_late_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let spec = ProcessSpec {
            rank: "stage-1".to_owned(),
            program: "/bin/sleep".into(),
            arguments: vec!["600".to_owned()],
            log: directory.path().join("stage-1.log"),
        };
        let (sender, mut events) = mpsc::unbounded_channel();
        let (want, wanted) = watch::channel(Wanted::Running);
        let begin = Instant::now();
        let kept = tokio::spawn(keep(spec, sender, wanted));
        let mut next = async || events.recv().await.map(|event| event.kind);
        assert!(matches!(next().await, Some(ProcessEventKind::Started(_))));
        assert!(matches!(next().await, Some(ProcessEventKind::Late(true))));
        assert!(begin.elapsed() >= LATE && begin.elapsed() < 2 * LATE);
        assert!(tokio::time::timeout(10 * LATE, next()).await.is_err());
        want.send_replace(Wanted::Killed);
        assert!(matches!(next().await, Some(ProcessEventKind::Stopped)));
        kept.await.expect("its end");
    }
}
